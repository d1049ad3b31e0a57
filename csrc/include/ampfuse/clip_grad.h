#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>

namespace ampfuse {

/// Returns the norm of all tensors taken as one vector.
///
/// \param tensors Tensors on any devices.
/// \param norm_type The order of the norm: 1, 2 or infinity.
/// \param error_if_nonfinite If true, the host waits for the norm, and throws unless it is finite.
/// \return A 0-dim tensor on the first tensor's device. It is 0 on the CPU for an empty list.
/// \throws c10::Error if `error_if_nonfinite` is set and the norm is NaN or infinite.
[[nodiscard]] AMPFUSE_API at::Tensor get_total_norm(at::TensorList tensors, double norm_type = 2.0,
                                                    bool error_if_nonfinite = false);

/// Multiplies gradients in place by min(1, max_norm / (total_norm + 1e-6)).
///
/// \param parameters Tensors whose gradients are clipped. Those without a gradient are left out.
/// \param max_norm The largest norm that is allowed. As in torch it is not checked: a negative one
///     reverses the gradients.
/// \param total_norm The norm of all gradients, as get_total_norm() returns it.
AMPFUSE_API void clip_grads_with_norm_(at::TensorList parameters, double max_norm,
                                       const at::Tensor& total_norm);

/// Scales gradients in place so that their total norm is at most `max_norm`.
///
/// torch::nn::utils::clip_grad_norm_ returns a double, so each call waits for the device. This
/// function returns a tensor and does not wait, unless `error_if_nonfinite` is set. With a
/// GradScaler, use GradScaler::clip_grad_norm_, which unscales and measures in one pass.
///
/// \param parameters Tensors whose gradients are clipped. Those without a gradient are left out.
/// \param max_norm The largest norm that is allowed. As in torch it is not checked: a negative one
///     reverses the gradients.
/// \param norm_type The order of the norm: 1, 2 or infinity.
/// \param error_if_nonfinite If true, the host waits for the norm, and throws unless it is finite.
/// \return The norm before clipping: a 0-dim tensor on the first gradient's device.
/// \throws c10::Error if `error_if_nonfinite` is set and the norm is NaN or infinite.
AMPFUSE_API at::Tensor clip_grad_norm_(at::TensorList parameters, double max_norm,
                                       double norm_type = 2.0, bool error_if_nonfinite = false);

}  // namespace ampfuse
