// The arguments of a cross-entropy, as its kernels see them.
#pragma once

#include "../ops/cross_entropy.h"
#include "cross_entropy_interface.h"

namespace ampfuse {

/// Throws for more classes than kernels can index.
void check_classes(const char* op, const char* argument, int64_t classes);

RowsAt rows_at(const at::Tensor& rows);

/// Returns null for a tensor without elements, which is an output that is not asked for.
inline void* data_or_null(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr();
}
template <typename T>
T* data_or_null(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr<T>();
}
inline math::RowStatistics* statistics_or_null(const at::Tensor& statistics) {
  return reinterpret_cast<math::RowStatistics*>(data_or_null<double>(statistics));
}

/// Returns the rows without a bad_target. Probabilities are converted to the dtype of the loss;
/// `converted` owns them and must live until the launch.
LogitRows logit_rows(const CrossEntropyArguments& arguments, at::Tensor& converted);

}  // namespace ampfuse
