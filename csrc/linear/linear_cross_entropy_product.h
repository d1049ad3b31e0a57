// Matrix products whose results may have a wider dtype than the operands.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace ampfuse {

/// True if wide_product() takes matrices of this dtype. Others must be widened first.
bool has_wide_product(at::ScalarType dtype, at::Device device);

/// Computes out = plus + a·b. `plus` is absent, one row that is added to each row, or `out` itself.
/// a and b have the same dtype, for which has_wide_product() is true. out and plus have that dtype,
/// or its accumulate_dtype(). The rows of out are contiguous; in a and b, either rows or columns
/// are.
void wide_product(at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                  const std::optional<at::Tensor>& plus);

}  // namespace ampfuse
