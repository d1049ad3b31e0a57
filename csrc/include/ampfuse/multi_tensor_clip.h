#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>

namespace ampfuse {

/// Multiplies every tensor by min(1, max_norm / (total_norm + 1e-6)) in place.
///
/// The factor is decided on the device: no host wait, and at factor 1 the tensors are neither read
/// nor written, though version counters move (strided ones on CUDA are copied out and back). A NaN
/// norm makes every element NaN, as torch does.
///
/// `tensors`: as for multi_tensor_unscale. `total_norm`: float32 or float64, one element, on the
/// tensors' device.
AMPFUSE_API void multi_tensor_clip(at::TensorList tensors, const at::Tensor& total_norm,
                                   double max_norm);

}  // namespace ampfuse
