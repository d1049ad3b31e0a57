#include "chunks.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "../math/multi_tensor_norm.h"

namespace ampfuse {

namespace {

// Entering a chunk costs about as much as a few hundred elements of it (some 50 ns).
constexpr int64_t kEntry = 512;
constexpr int64_t kStride = math::kNormChunk + kEntry;  // effort from one chunk start to the next

// Waking a thread costs microseconds: give it no less than this much effort, some 10 µs.
constexpr int64_t kGrain = 32768;

}  // namespace

Chunks::Chunks(std::vector<TensorRun> runs) : runs_(std::move(runs)) {
  first_.reserve(runs_.size() + 1);
  effort_.reserve(runs_.size() + 1);
  int64_t first = 0;
  int64_t effort = 0;
  for (const TensorRun& run : runs_) {
    first_.push_back(first);
    effort_.push_back(effort);
    const int64_t chunks = (run.size + math::kNormChunk - 1) / math::kNormChunk;
    first += chunks;
    effort += run.size + chunks * kEntry;
  }
  first_.push_back(first);
  effort_.push_back(effort);
}

void Chunks::parallel_for(const std::function<void(const Chunk&)>& visit) const {
  // The range is effort, not chunks, so that threads get equal work; a chunk is done by the thread
  // whose part of the range holds its start.
  at::parallel_for(0, effort_.back(), kGrain, [&](int64_t begin, int64_t end) {
    size_t tensor = std::upper_bound(effort_.begin(), effort_.end(), begin) - effort_.begin() - 1;
    int64_t chunk = (begin - effort_[tensor] + kStride - 1) / kStride;
    for (; tensor < runs_.size() && effort_[tensor] < end; ++tensor, chunk = 0) {
      const TensorRun& run = runs_[tensor];
      for (; chunk < this->end(tensor) - this->begin(tensor); ++chunk) {
        if (effort_[tensor] + chunk * kStride >= end) return;
        const int64_t offset = chunk * math::kNormChunk;
        visit({run.at(offset), std::min(math::kNormChunk, run.size - offset), run.dtype,
               this->begin(tensor) + chunk, tensor, offset});
      }
    }
  });
}

}  // namespace ampfuse
