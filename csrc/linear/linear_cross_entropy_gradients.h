// What the chunks of a linear cross-entropy leave of its gradients.
#pragma once

#include "../ops/linear_cross_entropy.h"
#include "linear_cross_entropy_layer.h"

namespace ampfuse {

/// The hidden states' are sums over all processes that have classes, the weight's and the bias's
/// over chunks: the weight's in float until all are added, unless there is only one, which is
/// rounded as it is multiplied.
class LinearGradients {
 public:
  LinearGradients(const LinearCrossEntropyArguments& arguments, const LinearHead& head,
                  const LinearGradientMask& wanted, int64_t chunks);

  /// From the gradient of a chunk's logits; `hidden` as head.rows() has them.
  void add(const at::Tensor& grad, const at::Tensor& hidden, int64_t first_row);

  LinearCrossEntropyGradients finish();

 private:
  void add_hidden(const at::Tensor& grad, int64_t first_row);

  const LinearCrossEntropyArguments& arguments_;
  const LinearHead& head_;
  LinearGradientMask wanted_;
  LinearCrossEntropyGradients gradients_;
  ShardSums sums_;
};

}  // namespace ampfuse
