#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>

#include <optional>

namespace ampfuse {

/// Multiplies every tensor by `inv_scale` in place and sets `found_inf` to 1 if a value is NaN or
/// infinite afterwards; never clears it. Unlike torch, which checks values before it multiplies
/// them, this also detects finite values that overflow in the product, as happens with scales below
/// 1.
///
/// `tensors`: as for multi_tensor_norm. They must not overlap each other, the other arguments or
/// themselves; a tensor that is listed twice is refused. `found_inf`, `inv_scale`: float32, one
/// element, on the tensors' device.
///
/// If `inv_scale` is 1, nothing is written (strided tensors on CUDA are still copied out and back),
/// but version counters increase. This is decided on the device, and the host does not wait.
AMPFUSE_API void multi_tensor_unscale(at::TensorList tensors, const at::Tensor& found_inf,
                                      const at::Tensor& inv_scale);

/// The norms that multi_tensor_norm would return after unscaling.
struct UnscaledNorm {
  at::Tensor total_norm;
  at::Tensor norms;
  at::Tensor first_nonfinite;
  at::Tensor nonfinite_count;
};

/// Does the same as multi_tensor_unscale, and computes the norms of the results in the same pass
/// over memory. They have the same bits as from multi_tensor_norm called afterwards.
AMPFUSE_API UnscaledNorm multi_tensor_unscale_norm(
    at::TensorList tensors, const at::Tensor& found_inf, const at::Tensor& inv_scale,
    double ord = 2.0, std::optional<at::ScalarType> dtype = std::nullopt);

}  // namespace ampfuse
