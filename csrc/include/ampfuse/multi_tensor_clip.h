#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>

namespace ampfuse {

/// Multiplies every tensor by min(1, max_norm / (total_norm + 1e-6)) in place.
///
/// The factor is computed on the device, and the host does not wait. If it is 1, the tensors are
/// neither read nor written, except those with gaps, which are copied out, and on CUDA also back.
/// Version counters increase nevertheless. A NaN norm makes every element NaN, as in torch.
///
/// \param tensors As for multi_tensor_unscale.
/// \param total_norm The norm of all tensors: float or double, one element, on their device.
/// \param max_norm The largest norm that is allowed.
AMPFUSE_API void multi_tensor_clip(at::TensorList tensors, const at::Tensor& total_norm,
                                   double max_norm);

}  // namespace ampfuse
