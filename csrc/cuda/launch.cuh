// The shape of a launch. A warp takes one chunk at a time, so a tensor of 64 elements occupies a
// warp and not a block, and any mixture of sizes keeps every multiprocessor busy.
#pragma once

#include <cstdint>

namespace ampfuse {

inline constexpr int kWarp = 32;
inline constexpr int kThreads = 256;  // per block
inline constexpr int kWarpsPerBlock = kThreads / kWarp;

// Most kernels are compiled for at least this many blocks per multiprocessor,
// __launch_bounds__(kThreads, kBlocksPerMultiprocessor), which leaves 64 registers per thread;
// those that process rows are compiled for kRowBlocks (cross_entropy_row.cuh). A grid has no more
// blocks than that, so the whole grid is resident at once. A warp that is finished takes another
// chunk; additional blocks would have to wait instead. 1024 threads with 64 bytes in flight each
// make 64 KiB, twice what a multiprocessor of an H200 needs to cover a latency of 0.8 µs (4.8 TB/s
// · 0.8 µs / 132 = 28 KiB).
inline constexpr int kBlocksPerMultiprocessor = 4;

// Returns the number of blocks for `warps` units of work; at least one, since CUDA rejects an empty
// grid.
inline int grid_size(int64_t warps, int multiprocessors) {
  const int64_t wanted = (warps + kWarpsPerBlock - 1) / kWarpsPerBlock;
  const int64_t resident = int64_t(multiprocessors) * kBlocksPerMultiprocessor;
  const int64_t blocks = wanted < resident ? wanted : resident;
  return blocks > 0 ? static_cast<int>(blocks) : 1;
}

// Upper bound on the bytes of static shared memory that a kernel declares.
inline constexpr int kMostStaticShared = 512;

// Returns true if a launch with this much dynamic shared memory is possible only after the limit of
// its kernel is raised. At first the limit is 48 KiB, for static and dynamic memory together.
constexpr bool must_ask_for_shared(int dynamic) {
  return dynamic > 48 * 1024 - kMostStaticShared;
}

// Returns the most dynamic shared memory that a launch may ask for if a block may have `per_block`
// bytes in total.
constexpr int64_t most_shared(int64_t per_block) {
  return per_block - kMostStaticShared;
}

}  // namespace ampfuse

#if defined(__CUDACC__)
// Kernels declare shared memory with these macros, and are launched with one. Tests that run them
// on the CPU define the macros differently, to detect overruns and reads before the first write.
#define AMPFUSE_SHARED(type, name, count) __shared__ type name[count]
#define AMPFUSE_DYNAMIC_SHARED(type, name) extern __shared__ type name[]
#define AMPFUSE_LAUNCH(kernel, blocks, threads, shared, stream) \
  kernel<<<blocks, threads, shared, stream>>>
#endif
