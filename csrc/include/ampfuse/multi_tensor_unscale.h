#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>

#include <optional>

namespace ampfuse {

/// Multiplies every tensor by `inv_scale` in place and sets `found_inf` to 1 if a value is NaN or
/// infinite afterwards; never clears it. Unlike torch, which looks before multiplying, this also
/// sees a finite value that overflows on the way, as happens with scales below 1.
///
/// `tensors`: as for multi_tensor_norm. One that is listed twice is multiplied twice; otherwise
/// neither they nor the other arguments may overlap, nor a tensor itself. `found_inf`, `inv_scale`:
/// float32, one element, on the tensors' device.
///
/// With `inv_scale` equal to 1 nothing is written, though version counters move: that is decided on
/// the device, and the host does not wait for it. (On CUDA strided tensors are copied out and back
/// all the same.)
AMPFUSE_API void multi_tensor_unscale(at::TensorList tensors, const at::Tensor& found_inf,
                                      const at::Tensor& inv_scale);

/// The norms that multi_tensor_norm would give afterwards.
struct UnscaledNorm {
  at::Tensor total_norm;
  at::Tensor norms;
  at::Tensor first_nonfinite;
  at::Tensor nonfinite_count;
};

/// multi_tensor_unscale, and the norms of what it wrote from the same pass over memory: the same
/// bits as multi_tensor_norm called after it.
AMPFUSE_API UnscaledNorm multi_tensor_unscale_norm(
    at::TensorList tensors, const at::Tensor& found_inf, const at::Tensor& inv_scale,
    double ord = 2.0, std::optional<at::ScalarType> dtype = std::nullopt);

}  // namespace ampfuse
