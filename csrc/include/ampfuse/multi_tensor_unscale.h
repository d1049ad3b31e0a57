#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>

#include <optional>

namespace ampfuse {

/// Multiplies every tensor by `inv_scale` in place and sets `found_inf` to 1 if a value is NaN or
/// infinite afterwards; it never clears `found_inf`. Unlike torch, which checks values before it
/// multiplies them, this also detects finite values that overflow in the product, as happens with
/// scales below 1.
///
/// If `inv_scale` is 1, nothing is written (on CUDA, tensors with gaps are still copied out and
/// back), but version counters increase. This is decided on the device, and the host does not wait.
///
/// \param tensors As for multi_tensor_norm. They must not overlap each other, the other arguments
///     or themselves; a tensor that is listed twice is refused.
/// \param found_inf The flag: float, one element, on the tensors' device.
/// \param inv_scale The factor: float, one element, on the tensors' device.
AMPFUSE_API void multi_tensor_unscale(at::TensorList tensors, const at::Tensor& found_inf,
                                      const at::Tensor& inv_scale);

/// The results of multi_tensor_unscale_norm, on the tensors' device. They are those that
/// multi_tensor_norm would return after unscaling.
struct UnscaledNorm {
  at::Tensor total_norm;       ///< 0-dim: the norm of all tensors
  at::Tensor norms;            ///< one norm per tensor
  at::Tensor first_nonfinite;  ///< 0-dim int64: the first tensor with a non-finite element, or -1
  at::Tensor nonfinite_count;  ///< 0-dim int64: number of tensors with non-finite elements
};

/// Does the same as multi_tensor_unscale, and computes the norms of the results in the same pass
/// over memory. They have the same bits as from multi_tensor_norm called afterwards.
///
/// \param tensors As for multi_tensor_unscale.
/// \param found_inf As for multi_tensor_unscale.
/// \param inv_scale As for multi_tensor_unscale.
/// \param ord As for multi_tensor_norm.
/// \param dtype As for multi_tensor_norm.
AMPFUSE_API UnscaledNorm multi_tensor_unscale_norm(
    at::TensorList tensors, const at::Tensor& found_inf, const at::Tensor& inv_scale,
    double ord = 2.0, std::optional<at::ScalarType> dtype = std::nullopt);

}  // namespace ampfuse
