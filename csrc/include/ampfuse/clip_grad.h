#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>

#include <vector>

namespace ampfuse {

/// The norm of `tensors` as one vector, a 0-dim tensor on the first tensor's device. Tensors may
/// be on several devices. `norm_type`: 1, 2 or infinity. With `error_if_nonfinite` the host waits
/// for the norm and throws when it is NaN or infinite.
AMPFUSE_API at::Tensor get_total_norm(at::TensorList tensors, double norm_type = 2.0,
                                      bool error_if_nonfinite = false);

/// Scales the gradients of `parameters` by min(1, max_norm / (total_norm + 1e-6)).
AMPFUSE_API void clip_grads_with_norm_(at::TensorList parameters, double max_norm,
                                       const at::Tensor& total_norm);

/// Scales the gradients of `parameters` so that their total norm is at most `max_norm`, and
/// returns the norm they had.
///
/// torch::nn::utils::clip_grad_norm_ returns a double, so each call waits for the device; this
/// returns a 0-dim tensor and does not, unless `error_if_nonfinite` asks for it. With a GradScaler
/// use its clip_grad_norm_, which unscales and measures in one pass.
AMPFUSE_API at::Tensor clip_grad_norm_(at::TensorList parameters, double max_norm,
                                       double norm_type = 2.0, bool error_if_nonfinite = false);

}  // namespace ampfuse
