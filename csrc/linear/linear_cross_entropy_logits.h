// The memory of some rows' logits and of their gradient.
//
// A logit takes 2, 4 or 8 bytes. A 16-bit gradient takes 2 more, unless it overwrites the logit.
#pragma once

#include "../ops/linear_cross_entropy.h"
#include "linear_cross_entropy_layer.h"

namespace ampfuse {

class LinearLogits {
 public:
  /// Throws for a dtype of logits that the device has no products for.
  LinearLogits(const CrossEntropyKernels& kernels, const LinearCrossEntropyArguments& arguments,
               const LinearLayer& layer);

  /// Returns the bytes of one logit and its gradient.
  int64_t logit_bytes() const;

  void allocate(int64_t rows, int64_t classes, bool with_gradient);
  void free();

  /// Return the memory of the first rows and classes. The gradient is [0] if none is wanted.
  at::Tensor values(int64_t rows, int64_t classes) const;
  at::Tensor grad(int64_t rows, int64_t classes) const;

  /// Returns the gradient with zeros up to this number of classes. There, a product may have
  /// written NaN, since it multiplied padding by infinite hidden states.
  at::Tensor padded_grad(int64_t rows, int64_t classes, int64_t padded_classes) const;

 private:
  at::TensorOptions options_;
  at::ScalarType dtype_;
  at::ScalarType grad_dtype_;
  bool has_own_grad_;
  at::Tensor values_;
  at::Tensor grad_;
};

}  // namespace ampfuse
