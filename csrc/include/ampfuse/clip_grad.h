#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>

namespace ampfuse {

/// Returns the norm of all `tensors` taken as one vector: a 0-dim tensor on the first tensor's
/// device. The tensors may be on several devices. `norm_type`: 1, 2 or infinity. With
/// `error_if_nonfinite` the host waits for the norm and throws if it is NaN or infinite.
AMPFUSE_API at::Tensor get_total_norm(at::TensorList tensors, double norm_type = 2.0,
                                      bool error_if_nonfinite = false);

/// Multiplies the gradients of `parameters` in place by min(1, max_norm / (total_norm + 1e-6)).
AMPFUSE_API void clip_grads_with_norm_(at::TensorList parameters, double max_norm,
                                       const at::Tensor& total_norm);

/// Scales the gradients of `parameters` in place so that their total norm is at most `max_norm`,
/// and returns their norm before clipping.
///
/// torch::nn::utils::clip_grad_norm_ returns a double, so each call waits for the device. This
/// function returns a 0-dim tensor and does not wait, unless `error_if_nonfinite` is set. With a
/// GradScaler, use GradScaler::clip_grad_norm_, which unscales and measures in one pass.
AMPFUSE_API at::Tensor clip_grad_norm_(at::TensorList parameters, double max_norm,
                                       double norm_type = 2.0, bool error_if_nonfinite = false);

}  // namespace ampfuse
