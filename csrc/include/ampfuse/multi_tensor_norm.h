#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>

#include <optional>

namespace ampfuse {

/// Results of one pass over a list of tensors, all on the tensors' device. The host does not wait.
struct MultiTensorNorm {
  /// 0-dim. Its dtype is `dtype`, by default float64 if any tensor is double or complex double,
  /// else float32.
  at::Tensor total_norm;
  at::Tensor norms;            ///< one norm per tensor, of the dtype of total_norm
  at::Tensor found_inf;        ///< 0-dim float32: 1 if any element is NaN or infinite, else 0
  at::Tensor first_nonfinite;  ///< 0-dim int64: the first tensor with a non-finite element, or -1
  at::Tensor nonfinite_count;  ///< 0-dim int64: number of tensors with non-finite elements
};

/// Computes the norm of a list of tensors taken as one vector, and further results of the same
/// pass.
///
/// Squares may overflow or underflow float32 without harm: a norm is infinite only if it is too
/// large for its dtype or an element is infinite. If any element is NaN, the norm is NaN. The bits
/// of a norm depend on the tensor's values in memory order, its dtype and, on CUDA, its alignment
/// to 16 bytes, but not on threads, launches or the rest of the list. An empty list has norm 0, on
/// the CPU.
///
/// \param tensors Tensors of any shapes and strides, in any mix of half, bfloat16, float, double,
///     complex float and complex double, all on one device.
/// \param ord The order of the norm: 1, 2 or infinity.
/// \param dtype The dtype of the norms: float or double. Sums are double, so a double norm of float
///     tensors is infinite only if an element is.
/// \throws c10::TypeError for an unsupported dtype.
/// \throws c10::ValueError for an unsupported layout or ord, and for tensors on several devices.
/// \throws c10::NotImplementedError for an unsupported device.
AMPFUSE_API MultiTensorNorm multi_tensor_norm(at::TensorList tensors, double ord = 2.0,
                                              std::optional<at::ScalarType> dtype = std::nullopt);

}  // namespace ampfuse
