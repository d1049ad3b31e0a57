// The rows of a linear cross-entropy, one chunk at a time, and the memory that all chunks share.
//
// Besides the gradients, memory is needed for one chunk's logits and their gradient.
#pragma once

#include <functional>

#include "../ops/linear_cross_entropy.h"
#include "linear_cross_entropy_logits.h"

namespace ampfuse {

class LinearChunks {
 public:
  LinearChunks(const CrossEntropyKernels& kernels, const LinearCrossEntropyArguments& arguments,
               bool with_gradient);

  int64_t rows() const { return arguments_.hidden.size(0); }
  int64_t chunks() const { return (rows() + chunk_rows_ - 1) / chunk_rows_; }

  struct Chunk {
    int64_t index;
    int64_t first_row;
    int64_t rows;
    CrossEntropyArguments loss;  // the chunk's loss, for the classes of this rank
    at::Tensor grad;             // receives the logits' gradient; [0] if none is wanted
  };

  /// Computes the logits of each chunk and visits it. Returns the gradients of hidden states,
  /// weight and bias, from the logits' gradients that the visits wrote. May be called only once.
  LinearCrossEntropyGradients each(const LinearGradientMask& wanted,
                                   const std::function<void(const Chunk&)>& visit);

 private:
  const LinearCrossEntropyArguments& arguments_;
  LinearLayer layer_;
  CrossEntropyArguments loss_;
  LinearLogits memory_;
  int64_t chunk_rows_;
};

/// Returns the number of rows of each chunk but the last. `logit_bytes` is the number of bytes of
/// one logit and its gradient.
int64_t linear_chunk_rows(const LinearCrossEntropyArguments& arguments, int64_t logit_bytes,
                          bool on_gpu);

}  // namespace ampfuse
