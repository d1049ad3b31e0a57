// A list of tensors as the CPU kernels of multi-tensor ops see it: chunks, which threads share
// evenly if the work is large enough.
#pragma once

#include <functional>
#include <vector>

#include "../tensors/tensor_list.h"

namespace ampfuse {

/// Consecutive elements of one tensor, `size` of them.
struct Chunk {
  void* data;
  int64_t size;
  at::ScalarType dtype;
  int64_t index;   // index of the chunk in the whole list
  size_t tensor;   // index of the tensor in the list
  int64_t offset;  // index of the first element in the tensor
};

class Chunks {
 public:
  explicit Chunks(std::vector<TensorRun> runs);

  int64_t count() const { return first_.back(); }

  /// Tensor i has the chunks [begin(i), end(i)). An empty tensor has none.
  int64_t begin(size_t tensor) const { return first_[tensor]; }
  int64_t end(size_t tensor) const { return first_[tensor + 1]; }

  /// Calls `visit` once for each chunk, on torch's intra-op threads if that is faster.
  void parallel_for(const std::function<void(const Chunk&)>& visit) const;

 private:
  void visit_range(const std::function<void(const Chunk&)>& visit, int64_t begin,
                   int64_t end) const;

  std::vector<TensorRun> runs_;  // one per tensor
  std::vector<int64_t> first_;   // index of each tensor's first chunk, then the number of chunks
  std::vector<int64_t> effort_;  // effort before each tensor, in elements, then the total effort
  bool has_long_ = false;        // true if a tensor is worth several threads
};

}  // namespace ampfuse
