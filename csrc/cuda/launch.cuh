// The shape of a launch: warps are the workers. A warp takes one chunk at a time, so a 64-element
// tensor costs a warp and not a block, and any mixture of sizes keeps every multiprocessor busy.
#pragma once

#include <cstdint>

namespace ampfuse {

inline constexpr int kWarp = 32;
inline constexpr int kThreads = 256;  // per block
inline constexpr int kWarpsPerBlock = kThreads / kWarp;

// Kernels are compiled for at least this many blocks on a multiprocessor,
// __launch_bounds__(kThreads, kBlocksPerMultiprocessor), which leaves a thread 64 registers; a grid
// has no more, so all of it is resident at once and a warp that is done takes another chunk, where
// a further block would have had to wait. 1024 threads with 64 bytes on their way each are 64 KiB
// in flight, twice what a multiprocessor of an H200 needs to cover 0.8 µs of latency (4.8 TB/s ·
// 0.8 µs / 132 = 29 KiB).
inline constexpr int kBlocksPerMultiprocessor = 4;

// Blocks for `warps` units of work, at least one, since CUDA refuses an empty grid.
inline int grid_size(int64_t warps, int multiprocessors) {
  const int64_t wanted = (warps + kWarpsPerBlock - 1) / kWarpsPerBlock;
  const int64_t resident = int64_t(multiprocessors) * kBlocksPerMultiprocessor;
  const int64_t blocks = wanted < resident ? wanted : resident;
  return blocks > 0 ? static_cast<int>(blocks) : 1;
}

// Bytes of shared memory that a kernel declares itself, at most, beside those a launch brings.
inline constexpr int kOwnShared = 512;

// Whether CUDA would refuse a launch that did not ask for its shared memory before: the 48 KiB that
// a block has anyway are for what its kernel declares, too.
constexpr bool must_ask_for_shared(int dynamic) {
  return dynamic > 48 * 1024 - kOwnShared;
}

// The most that a launch may ask for where a block may have so many bytes in all.
constexpr int64_t most_shared(int64_t per_block) {
  return per_block - kOwnShared;
}

}  // namespace ampfuse

#if defined(__CUDACC__)
// Kernels declare shared memory through these, so that the tests that run them on the CPU can put
// each array where an overrun or a read before a write shows.
#define AMPFUSE_SHARED(type, name, count) __shared__ type name[count]
#define AMPFUSE_DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#endif
