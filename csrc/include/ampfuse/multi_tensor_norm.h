#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>

#include <optional>

namespace ampfuse {

/// What one read of a tensor list tells. All on the tensors' device; nothing waits for it.
struct MultiTensorNorm {
  at::Tensor total_norm;  ///< 0-dim; float32, float64 if any tensor is double or complex double
  at::Tensor norms;       ///< [tensors], one norm each, dtype of total_norm
  at::Tensor found_inf;   ///< 0-dim float32: 1 if any element is NaN or infinite, else 0
  at::Tensor
      first_nonfinite;  ///< 0-dim int64: index of the first tensor with such an element, or -1
  at::Tensor nonfinite_count;  ///< 0-dim int64: number of such tensors
};

/// The norm of a list of tensors as if they were one vector.
///
/// `tensors`: any shapes and strides, any mix of half, bfloat16, float, double, complex float and
/// complex double, all on one device. `ord`: 1, 2 or infinity.
///
/// 16-bit lists give a float32 norm. Squares that overflow or underflow float32 are handled, so a
/// norm is infinite only when it is too large for its dtype or an element is infinite; NaN wins
/// over infinity. The bits depend on a tensor's values in memory order, its dtype and, on CUDA, its
/// alignment to 16 bytes; not on threads, launches or the rest of the list.
/// An empty list has norm 0, on the CPU.
///
/// `dtype`: of the norms, float or double: the sums are double, and as such a norm of floats is
/// infinite only when an element is.
///
/// Throws c10::TypeError for a dtype and c10::ValueError for a device, layout or ord not listed.
AMPFUSE_API MultiTensorNorm multi_tensor_norm(at::TensorList tensors, double ord = 2.0,
                                              std::optional<at::ScalarType> dtype = std::nullopt);

}  // namespace ampfuse
