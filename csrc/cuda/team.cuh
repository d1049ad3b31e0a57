// Teams of threads that share a unit of work, and reductions over the threads of a team.
#pragma once

#include <cstdint>

#include "../math/lane.h"
#include "launch.cuh"

namespace ampfuse {

// A team of kLanes lanes of a warp: all 32 for short rows, fewer for rows of a few packs. The teams
// of a warp process different rows and may diverge, unless kInStep says that they do the same.
template <int kLanes, bool kInStep = kLanes == kWarp>
class LaneTeam {
 public:
  static constexpr int kSize = kLanes;
  static constexpr int kBlock = kThreads;        // threads per block
  static constexpr int kTeams = kBlock / kSize;  // teams per block
  static constexpr bool kIsWide = false;

  __device__ explicit LaneTeam(double* /*scratch*/) {}
  __device__ int index() const { return static_cast<int>(threadIdx.x) % kSize; }
  __device__ int index_in_block() const { return static_cast<int>(threadIdx.x) / kSize; }
  __device__ int64_t number() const { return int64_t(blockIdx.x) * kTeams + index_in_block(); }
  __device__ static int64_t count() { return int64_t(gridDim.x) * kTeams; }
  __device__ void sync() const { __syncwarp(mask()); }

  // All lanes get the same result: both lanes of a pair join the same two values.
  template <typename T, typename Join>
  __device__ T joined(T x, Join join) const {
#pragma unroll
    for (int offset = kSize / 2; offset > 0; offset /= 2) {
      x = join(x, __shfl_xor_sync(mask(), x, offset));
    }
    return x;
  }

 private:
  __device__ unsigned mask() const {
    if constexpr (kInStep) return 0xffffffffu;
    return ((1u << (kSize % kWarp)) - 1) << (threadIdx.x % kWarp / kSize * kSize);
  }
};

using WarpTeam = LaneTeam<kWarp>;

// A team of all threads of a block. Longer rows take larger blocks, which hold more logits in
// registers. Fewer large blocks share a multiprocessor, so each row has more shared memory.
template <int kBlockSize>
class BlockTeam {
 public:
  static constexpr int kSize = kBlockSize;
  static constexpr int kBlock = kSize;
  static constexpr int kTeams = 1;
  static constexpr int kWarps = kSize / kWarp;
  static constexpr bool kIsWide = kSize > kThreads;
  using Warps = LaneTeam<kWarps, true>;  // joins what of_warps() returns

  // `scratch` is an array of kWarps numbers in shared memory.
  __device__ explicit BlockTeam(double* scratch) : scratch_(scratch) {}
  __device__ int index() const { return static_cast<int>(threadIdx.x); }
  __device__ int index_in_block() const { return 0; }
  __device__ int64_t number() const { return blockIdx.x; }
  __device__ static int64_t count() { return gridDim.x; }
  __device__ void sync() const { __syncthreads(); }

  template <typename T, typename Join>
  __device__ T joined(T x, Join join) const {
    const double of_warp = WarpTeam(nullptr).joined(x, join);
    return Warps(nullptr).joined(static_cast<T>(of_warps(of_warp)), join);
  }

  // Returns `mine` of the first thread of warp number index() % kWarps.
  __device__ double of_warps(double mine) const {
    if (index() % kWarp == 0) scratch_[index() / kWarp] = mine;
    __syncthreads();
    const double other = scratch_[index() % kWarps];
    __syncthreads();  // the next call writes to scratch_ again
    return other;
  }

 private:
  double* scratch_;
};

template <typename Team, typename T>
__device__ T team_sum(const Team& team, T x) {
  return team.joined(x, [](T a, T b) { return a + b; });
}
template <typename Team, typename T>
__device__ T team_largest(const Team& team, T x) {
  return team.joined(x, [](T a, T b) { return math::Lane<T>::larger(a, b); });
}
template <typename Team, typename T>
__device__ T team_smallest(const Team& team, T x) {
  return team.joined(x, [](T a, T b) { return a < b ? a : b; });
}

// Returns true in the last block of the grid that calls this. That block sees what the first thread
// of each block wrote before. It must read this through volatile pointers, since a cache may hold
// stale lines. `finished` must be 0 before the launch. All threads of a block must call this.
__device__ __forceinline__ bool is_last_block(unsigned* finished) {
  AMPFUSE_SHARED(bool, is_last, 1);
  if (threadIdx.x == 0) {
    __threadfence();  // a block's writes are visible before it counts as finished
    *is_last = atomicAdd(finished, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!*is_last) return false;
  __threadfence();
  return true;
}

}  // namespace ampfuse
