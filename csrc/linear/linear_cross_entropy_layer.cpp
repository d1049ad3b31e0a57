#include "linear_cross_entropy_layer.h"

#include <ATen/ops/empty.h>
#include <ATen/ops/ones.h>

#include <algorithm>
#include <vector>

#include "../ops/linear_cross_entropy.h"
#include "../tensors/variant.h"
#include "linear_cross_entropy_product.h"

namespace ampfuse {

namespace {

// The number of classes of a 16-bit weight that a CPU processes at a time. A CPU without
// instructions for 16-bit products copies the weights of these classes to float, in weight_block()
// or in the product. A copy of the whole weight would be much larger.
constexpr int64_t kBlockClasses = 8192;

// cuBLAS prefers 16 bytes, 8 elements of 16 bits.
constexpr int64_t kMultiple = 8;

at::Tensor in_rows(const at::Tensor& matrix) {
  const bool has_rows = matrix.stride(1) == 1 && matrix.stride(0) >= matrix.size(1);
  return has_rows ? matrix : matrix.clone(at::MemoryFormat::Contiguous);
}

// Returns the matrix in this dtype, with zeros up to these sizes. A copy converts and pads at once;
// at::constant_pad_nd would need a converted copy before.
at::Tensor padded(const at::Tensor& matrix, at::ScalarType dtype, int64_t rows, int64_t columns) {
  const int64_t filled_rows = matrix.size(0);
  const int64_t filled_columns = matrix.size(1);
  if (rows == filled_rows && columns == filled_columns) return in_rows(matrix.to(dtype));
  at::Tensor all = at::empty({rows, columns}, matrix.options().dtype(dtype));
  const at::Tensor filled = all.narrow(0, 0, filled_rows);
  filled.narrow(1, 0, filled_columns).copy_(matrix);
  filled.narrow(1, filled_columns, columns - filled_columns).zero_();
  all.narrow(0, filled_rows, rows - filled_rows).zero_();
  return all;
}

}  // namespace

LinearLayer::LinearLayer(const at::Tensor& weight, const std::optional<at::Tensor>& bias,
                         at::ScalarType dtype)
    : weight_(padded(weight, dtype, padded_size(weight.size(0), weight.is_cuda()),
                     padded_size(weight.size(1), weight.is_cuda()))),
      sum_dtype_(accumulate_dtype(dtype)) {
  gradient_dtype_ = has_wide_product(dtype, weight.device()) ? dtype : sum_dtype_;
  if (bias) bias_ = padded(bias->unsqueeze(0), sum_dtype_, 1, classes()).squeeze(0);
}

int64_t LinearLayer::padded_size(int64_t size, bool on_gpu) {
  const bool is_padded = on_gpu || has_variant("padded_products");
  return is_padded ? (size + kMultiple - 1) / kMultiple * kMultiple : size;
}

// Calls visit(first class, number of classes) for each block of classes.
template <typename Visit>
void LinearLayer::each_block(const Visit& visit) const {
  const bool is_widened = weight_.is_cpu() && sum_dtype_ != weight_.scalar_type();
  each_block_of(is_widened ? kBlockClasses : weight_.size(0), visit);
}

template <typename Visit>
void LinearLayer::each_block_of(int64_t block_classes, const Visit& visit) const {
  const int64_t classes = weight_.size(0);
  for (int64_t first = 0; first < classes; first += block_classes) {
    visit(first, std::min(block_classes, classes - first));
  }
}

// Calls compute(first class, number of classes, product) for blocks of classes, and rounds their
// products to `out`.
template <typename Compute>
void LinearLayer::multiply_rounded(at::Tensor& out, int64_t class_dim,
                                   const Compute& compute) const {
  const int64_t class_bytes =
      std::max<int64_t>(1, out.size(1 - class_dim)) * at::elementSize(sum_dtype_);
  const int64_t block_classes = std::clamp<int64_t>(kBlockBytes / class_bytes, 256, kBlockClasses);
  std::vector<int64_t> sizes = out.sizes().vec();
  sizes[class_dim] = std::min(block_classes, out.size(class_dim));
  const at::Tensor products = at::empty(sizes, out.options().dtype(sum_dtype_));
  each_block_of(block_classes, [&](int64_t first, int64_t count) {
    at::Tensor product = products.narrow(class_dim, 0, count);
    compute(first, count, product);
    out.narrow(class_dim, first, count).copy_(product);
  });
}

bool LinearLayer::can_multiply_into(const at::Tensor& out) const {
  return out.scalar_type() == sum_dtype_ || (out.is_cuda() && out.scalar_type() == gradient_dtype_);
}

at::Tensor LinearLayer::weight_block(int64_t first, int64_t count) const {
  return weight_.narrow(0, first, count).to(gradient_dtype_);
}

at::Tensor LinearLayer::rows(const at::Tensor& hidden, int64_t first, int64_t count) const {
  const at::Tensor some = hidden.narrow(0, first, count).to(weight_.scalar_type());
  return padded(some, gradient_dtype_, count, features());
}

void LinearLayer::logits(const at::Tensor& rows, at::Tensor& out) const {
  const auto compute = [&](int64_t first, int64_t count, at::Tensor& product) {
    std::optional<at::Tensor> bias;
    if (bias_) bias = bias_->narrow(0, first, count).to(product.scalar_type());
    wide_product(product, rows, weight_block(first, count).t(), bias);
  };
  if (can_multiply_into(out)) {
    return each_block([&](int64_t first, int64_t count) {
      at::Tensor block = out.narrow(1, first, count);
      compute(first, count, block);
    });
  }
  multiply_rounded(out, /*class_dim=*/1, compute);
}

void LinearLayer::hidden_gradient(const at::Tensor& grad, const at::Tensor& out) const {
  const at::ScalarType dtype = can_multiply_into(out) ? out.scalar_type() : sum_dtype_;
  const bool is_like_out = dtype == out.scalar_type() && features() == out.size(1);
  at::Tensor sum =
      is_like_out ? out : at::empty({out.size(0), features()}, out.options().dtype(dtype));
  add_hidden_gradient(grad, sum, /*is_first=*/true);
  if (!is_like_out) out.copy_(sum.narrow(1, 0, out.size(1)));
}

void LinearLayer::add_hidden_gradient(const at::Tensor& grad, at::Tensor& sum,
                                      bool is_first) const {
  each_block([&](int64_t first, int64_t count) {
    std::optional<at::Tensor> before;
    if (first > 0 || !is_first) before = sum;
    wide_product(sum, grad.narrow(1, first, count), weight_block(first, count), before);
  });
  if (weight_.size(0) == 0 && is_first) sum.zero_();
}

void LinearLayer::weight_gradient(const at::Tensor& grad, const at::Tensor& rows, at::Tensor& sum,
                                  bool is_first) const {
  if (!can_multiply_into(sum)) {
    TORCH_INTERNAL_ASSERT(is_first);
    return multiply_rounded(
        sum, /*class_dim=*/0, [&](int64_t first, int64_t count, at::Tensor& product) {
          wide_product(product, grad.narrow(1, first, count).t(), rows, std::nullopt);
        });
  }
  each_block([&](int64_t first, int64_t count) {
    at::Tensor block = sum.narrow(0, first, count);
    std::optional<at::Tensor> before;
    if (!is_first) before = block;
    wide_product(block, grad.narrow(1, first, count).t(), rows, before);
  });
}

void LinearLayer::bias_gradient(const at::Tensor& grad, at::Tensor& sum, bool is_first) const {
  if (grad.is_cpu() && grad.scalar_type() != sum_dtype_) {
    // A CPU would copy the gradient to sum it in another dtype; a product with ones does not.
    at::Tensor row = sum.unsqueeze(0);
    std::optional<at::Tensor> before;
    if (!is_first) before = row;
    wide_product(row, at::ones({1, grad.size(0)}, grad.options()), grad, before);
    return;
  }
  const at::Tensor of_rows = grad.sum(0, /*keepdim=*/false, sum_dtype_);
  is_first ? sum.copy_(of_rows) : sum.add_(of_rows);
}

}  // namespace ampfuse
