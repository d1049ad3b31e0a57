// The last layer of a model, for some rows at a time: its logits, and the gradients of hidden
// states, weight and bias from the gradient of the logits.
//
// On a GPU, matrices are padded with zeros to multiples of 8 classes and features. cuBLAS has no
// fast kernels for other sizes: on an H200, products of 8192 rows, 768 features and 50,257 classes
// (GPT-2) took 6.7 and 4.9 ms, and with 50,304 classes 0.85 and 0.77 ms.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace ampfuse {

class LinearLayer {
 public:
  /// Products that are rounded are computed in blocks of about this many bytes, but of at least
  /// 256 and at most 8192 classes.
  static constexpr int64_t kBlockBytes = 4 << 20;

  /// `weight`: [classes, features]. `bias`: [classes]. Products are in `dtype`.
  LinearLayer(const at::Tensor& weight, const std::optional<at::Tensor>& bias,
              at::ScalarType dtype);

  /// Returns `size` with padding.
  static int64_t padded_size(int64_t size, bool on_gpu);

  /// The weight in `dtype`, with padding. Its sizes are those of the matrices below.
  const at::Tensor& weight() const { return weight_; }
  int64_t classes() const { return weight_.size(0); }
  int64_t features() const { return weight_.size(1); }

  /// The dtype in which products are summed: float for 16-bit ones.
  at::ScalarType sum_dtype() const { return sum_dtype_; }
  /// The dtype in which the logits' gradient is multiplied.
  at::ScalarType gradient_dtype() const { return gradient_dtype_; }

  /// Returns some rows of the hidden states, in the dtype, layout and size that products take.
  at::Tensor rows(const at::Tensor& hidden, int64_t first, int64_t count) const;

  /// Computes out = rows · weightᵀ + bias. `out` has sum_dtype() or gradient_dtype().
  void logits(const at::Tensor& rows, at::Tensor& out) const;
  /// Computes out = grad · weight. `grad` has zeros as padding. `out` has no padding, and may have
  /// any dtype.
  void hidden_gradient(const at::Tensor& grad, const at::Tensor& out) const;
  /// Computes sum = grad · weight if `is_first`, else sum += grad · weight. `sum` has sum_dtype(),
  /// or on a GPU gradient_dtype() if `is_first`.
  void add_hidden_gradient(const at::Tensor& grad, at::Tensor& sum, bool is_first) const;
  /// Computes sum = gradᵀ · rows if `is_first`, else sum += gradᵀ · rows. `sum` has
  /// sum_dtype(); if `is_first` it may have any dtype.
  void weight_gradient(const at::Tensor& grad, const at::Tensor& rows, at::Tensor& sum,
                       bool is_first) const;
  /// Sets `sum` to the sum of `grad` over rows if `is_first`, else adds it. `sum` has sum_dtype().
  void bias_gradient(const at::Tensor& grad, at::Tensor& sum, bool is_first) const;

 private:
  template <typename Visit>
  void each_block(const Visit& visit) const;
  template <typename Visit>
  void each_block_of(int64_t block_classes, const Visit& visit) const;
  // True if products can be computed in the dtype of `out`.
  bool can_multiply_into(const at::Tensor& out) const;
  template <typename Compute>
  void multiply_rounded(at::Tensor& out, int64_t class_dim, const Compute& compute) const;
  at::Tensor weight_block(int64_t first, int64_t count) const;

  at::Tensor weight_;
  std::optional<at::Tensor> bias_;
  at::ScalarType sum_dtype_;
  at::ScalarType gradient_dtype_;
};

}  // namespace ampfuse
