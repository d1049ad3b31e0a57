// The CPU side of a multi-tensor op: a list cut into chunks, which threads share evenly where the
// list has long tensors.
#pragma once

#include <functional>
#include <vector>

#include "../tensors/tensor_list.h"

namespace ampfuse {

/// At most `size` consecutive elements of one tensor.
struct Chunk {
  void* data;
  int64_t size;
  at::ScalarType dtype;
  int64_t number;  // counted through the whole list
  size_t tensor;   // its place in the list
  int64_t offset;  // of the first element in the tensor
};

class Chunks {
 public:
  explicit Chunks(std::vector<TensorRun> runs);

  int64_t count() const { return first_.back(); }

  /// The chunks [begin(i), end(i)) are those of tensor i, none when it is empty.
  int64_t begin(size_t tensor) const { return first_[tensor]; }
  int64_t end(size_t tensor) const { return first_[tensor + 1]; }

  /// Calls `visit` once for each chunk, from torch's intra-op threads where they pay.
  void parallel_for(const std::function<void(const Chunk&)>& visit) const;

 private:
  void visit_range(const std::function<void(const Chunk&)>& visit, int64_t begin,
                   int64_t end) const;

  std::vector<TensorRun> runs_;  // per tensor
  std::vector<int64_t> first_;   // per tensor, and the total: number of its first chunk
  std::vector<int64_t> effort_;  // likewise: work before it, in elements
  bool has_long_ = false;        // whether a tensor is worth several threads
};

}  // namespace ampfuse
