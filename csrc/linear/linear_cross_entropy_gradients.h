// The gradients of a linear cross-entropy, accumulated over its chunks.
#pragma once

#include "../ops/linear_cross_entropy.h"
#include "linear_cross_entropy_layer.h"

namespace ampfuse {

/// Allocates uninitialised memory. The gradients of weight and bias have the padding of `layer`.
LinearCrossEntropyGradients padded_linear_gradients(LinearCrossEntropyArguments arguments,
                                                    const LinearLayer& layer,
                                                    const LinearGradientMask& wanted);

/// Removes the padding, and rounds the weight's gradient to arguments.weight_grad_dtype.
LinearCrossEntropyGradients finished_linear_gradients(LinearCrossEntropyGradients gradients,
                                                      const LinearCrossEntropyArguments& arguments);

/// The gradient of the hidden states is summed over the ranks that share the classes. The gradients
/// of weight and bias are summed over chunks. The weight's is kept in float until all chunks are
/// added; if there is only one chunk, its product is rounded directly.
class LinearGradients {
 public:
  LinearGradients(const LinearCrossEntropyArguments& arguments, const LinearLayer& layer,
                  const LinearGradientMask& wanted, int64_t chunks);

  /// Adds a chunk, given the padded gradient of its logits and its `hidden` from layer.rows().
  void add(const at::Tensor& grad, const at::Tensor& hidden, int64_t first_row);

  LinearCrossEntropyGradients finish();

 private:
  void add_hidden(const at::Tensor& grad, int64_t first_row);

  const LinearCrossEntropyArguments& arguments_;
  const LinearLayer& layer_;
  LinearGradientMask wanted_;
  LinearCrossEntropyGradients gradients_;
  ShardSums sums_;
};

}  // namespace ampfuse
