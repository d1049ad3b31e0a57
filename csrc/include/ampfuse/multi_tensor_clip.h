#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>

namespace ampfuse {

/// Multiplies every tensor by min(1, max_norm / (total_norm + 1e-6)) in place.
///
/// The factor is computed on the device, and the host does not wait. If it is 1, the tensors are
/// neither read nor written (strided ones on CUDA are still copied out and back), but their version
/// counters increase. A NaN norm makes every element NaN, as in torch.
///
/// `tensors`: as for multi_tensor_unscale. `total_norm`: float32 or float64, one element, on the
/// tensors' device.
AMPFUSE_API void multi_tensor_clip(at::TensorList tensors, const at::Tensor& total_norm,
                                   double max_norm);

}  // namespace ampfuse
