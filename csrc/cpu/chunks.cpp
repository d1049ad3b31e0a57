#include "chunks.h"

#include <ATen/Parallel.h>

#include <algorithm>

#include "../math/multi_tensor_norm.h"

namespace ampfuse {

namespace {

// Starting a chunk takes about as long as processing this many elements.
constexpr int64_t kChunkCost = 512;
constexpr int64_t kStride =
    math::kNormChunk + kChunkCost;  // effort from one chunk's start to the next

// A thread gets at least this much effort, about 10 µs, because waking a thread costs microseconds.
//
// If other processes keep the cores busy, sharing a list costs far more. The loop ends when its
// last thread ends, and that thread may wait for a time slice of milliseconds, longer than most
// lists take. So a list is shared among threads only in two cases: one of its tensors has more
// elements than this (torch's multi-tensor functions share such tensors, too, one by one), or the
// whole list takes longer than a time slice. All other lists are visited by one thread. 1000
// tensors of 1K elements then take 0.3 ms; when they were shared, they took 40 ms on busy cores.
constexpr int64_t kGrain = 32768;
constexpr int64_t kLongList = int64_t{8} << 20;  // about 3 ms

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
    effort += run.size + chunks * kChunkCost;
    has_long_ |= run.size > kGrain;
  }
  first_.push_back(first);
  effort_.push_back(effort);
}

void Chunks::parallel_for(const std::function<void(const Chunk&)>& visit) const {
  const int64_t effort = effort_.back();
  if (!has_long_ && effort < kLongList) {
    visit_range(visit, 0, effort);
    return;
  }
  at::parallel_for(0, effort, kGrain,
                   [&](int64_t begin, int64_t end) { visit_range(visit, begin, end); });
}

// The range counts effort, not chunks, so that threads get equal work. A chunk is visited by the
// thread whose range contains the chunk's start.
void Chunks::visit_range(const std::function<void(const Chunk&)>& visit, int64_t begin,
                         int64_t end) const {
  size_t tensor = std::upper_bound(effort_.begin(), effort_.end(), begin) - effort_.begin() - 1;
  int64_t chunk = (begin - effort_[tensor] + kStride - 1) / kStride;
  for (; tensor < runs_.size() && effort_[tensor] < end; ++tensor, chunk = 0) {
    const TensorRun& run = runs_[tensor];
    for (; chunk < this->end(tensor) - this->begin(tensor); ++chunk) {
      if (effort_[tensor] + chunk * kStride >= end) return;
      const int64_t offset = chunk * math::kNormChunk;
      void* const data =
          static_cast<char*>(run.data) + offset * static_cast<int64_t>(c10::elementSize(run.dtype));
      visit({data, std::min(math::kNormChunk, run.size - offset), run.dtype,
             this->begin(tensor) + chunk, tensor, offset});
    }
  }
}

}  // namespace ampfuse
