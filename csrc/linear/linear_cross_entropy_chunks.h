// The rows of a linear cross-entropy, a chunk at a time, and the memory that chunks share.
//
// Beside the gradients there is memory for a chunk's logits, 4 bytes each, and for their gradient
// of 16 bits 2 more, unless it can be where they are.
#pragma once

#include <functional>

#include "../ops/cross_entropy_kernels.h"
#include "../ops/linear_cross_entropy.h"
#include "linear_cross_entropy_layer.h"

namespace ampfuse {

class LinearChunks {
 public:
  LinearChunks(const CrossEntropyKernels& kernels, const LinearCrossEntropyArguments& arguments,
               bool with_gradient);

  /// Of rows, and of chunks.
  int64_t count() const { return arguments_.hidden.size(0); }
  int64_t number() const { return (count() + rows_ - 1) / rows_; }

  struct Chunk {
    int64_t number;
    int64_t first_row;
    int64_t rows;
    CrossEntropyArguments loss;  // of its logits, of the classes that are here
    at::Tensor grad;             // where their gradient goes, or [0]
  };

  /// Visits each, once, and returns what all have left as their logits' gradients makes of others.
  LinearCrossEntropyGradients each(const LinearGradientMask& wanted,
                                   const std::function<void(const Chunk&)>& visit);

 private:
  const LinearCrossEntropyArguments& arguments_;
  LinearHead head_;
  CrossEntropyArguments loss_;
  int64_t rows_;
  at::Tensor logits_;
  at::Tensor grad_;
};

}  // namespace ampfuse
