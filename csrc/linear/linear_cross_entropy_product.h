// Products of matrices that come wider than what they are made of.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace ampfuse {

/// Whether wide_product() takes matrices of this dtype as they are. Others have to be widened.
bool has_wide_product(at::ScalarType dtype, at::Device device);

/// out = plus + a·b, where `plus` is nothing, a row for each row, or `out` itself. a and b are of
/// one dtype that has wide products, out and plus of its wide one. a, b and out are matrices whose
/// rows or, for a and b, columns lie in one piece.
void wide_product(at::Tensor& out, const at::Tensor& a, const at::Tensor& b,
                  const std::optional<at::Tensor>& plus);

}  // namespace ampfuse
