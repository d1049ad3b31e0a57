// The last layer of a model, rows at a time: its logits, and what their gradient makes of its own.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace ampfuse {

class LinearHead {
 public:
  /// Of [classes, features] and [classes]. Multiplies in `dtype`.
  LinearHead(const at::Tensor& weight, const std::optional<at::Tensor>& bias, at::ScalarType dtype);

  /// Wider than what they are made of: a bfloat16 logit of 40 is off by up to 1/8.
  at::ScalarType logits_dtype() const { return logits_dtype_; }
  /// In which their gradient is multiplied.
  at::ScalarType gradient_dtype() const { return gradient_dtype_; }

  /// Some rows of the hidden states as they are multiplied.
  at::Tensor rows(const at::Tensor& hidden, int64_t first, int64_t count) const;

  /// out = rows · weightᵀ + bias
  void logits(const at::Tensor& rows, at::Tensor& out) const;
  /// out = grad · weight, of any dtype
  void hidden_gradient(const at::Tensor& grad, const at::Tensor& out) const;
  /// sum = gradᵀ · rows, or sum += it, of the logits' dtype; of any dtype when it is the first
  void weight_gradient(const at::Tensor& grad, const at::Tensor& rows, at::Tensor& sum,
                       bool is_first) const;
  /// The same for the bias.
  void bias_gradient(const at::Tensor& grad, at::Tensor& sum, bool is_first) const;

 private:
  template <typename Visit>
  void each_block(const Visit& visit) const;
  template <typename Visit>
  void each_block_of(int64_t most, const Visit& visit) const;
  // Whether products come in its dtype.
  bool is_product_of(const at::Tensor& out) const;
  void rounded_weight_gradient(const at::Tensor& grad, const at::Tensor& rows,
                               at::Tensor& out) const;
  at::Tensor weight_of(int64_t first, int64_t count) const;

  at::Tensor weight_;
  std::optional<at::Tensor> bias_;
  at::ScalarType logits_dtype_;
  at::ScalarType gradient_dtype_;
};

}  // namespace ampfuse
