// Who works together on a reduction: the lanes of a warp, or the threads of a block. Both are
// Workers for math/, and both add in an order fixed by the number of threads alone.
#pragma once

#include "../math/multi_tensor_norm.h"
#include "launch.cuh"

namespace ampfuse {

class WarpWorkers {
 public:
  __device__ explicit WarpWorkers(int lane) : lane_(lane) {}
  __device__ int index() const { return lane_; }
  __device__ int count() const { return kWarp; }

  // Every lane gets the same result: each pair adds the same two numbers.
  template <math::NormType kNorm>
  __device__ double join(double x) const {
#pragma unroll
    for (int offset = kWarp / 2; offset > 0; offset /= 2) {
      x = math::norm_join<kNorm>(x, __shfl_xor_sync(0xffffffffu, x, offset));
    }
    return x;
  }

 private:
  int lane_;
};

class BlockWorkers {
 public:
  // `scratch`: kWarpsPerBlock numbers in shared memory. The block has kThreads threads in a row.
  __device__ explicit BlockWorkers(double* scratch) : scratch_(scratch) {}
  __device__ int index() const { return static_cast<int>(threadIdx.x); }
  __device__ int count() const { return kThreads; }

  // Every thread gets the same result.
  template <math::NormType kNorm>
  __device__ double join(double x) const {
    const int lane = index() % kWarp;
    const WarpWorkers warp(lane);
    x = warp.join<kNorm>(x);
    if (lane == 0) scratch_[index() / kWarp] = x;
    __syncthreads();
    x = warp.join<kNorm>(lane < kWarpsPerBlock ? scratch_[lane] : 0.0);
    __syncthreads();  // scratch_ is written again by the next join
    return x;
  }

 private:
  double* scratch_;
};

}  // namespace ampfuse
