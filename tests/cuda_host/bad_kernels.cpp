// Kernels with one known mistake each: the sanitizers or the runtime must catch them.
//
//   bad_kernels NAME   runs the kernel with the mistake; bad_kernels.cmake has the words that must
//                      appear
//   bad_kernels        runs the twins without the mistakes, under every schedule
//
// All kernels fill `out`, which has one element per thread of the grid, with ones. `x` has the same
// length and holds ones.

#include <cstdint>
#include <cstdio>
#include <cstring>
#include <vector>

#include "simt/simt.h"

namespace {

constexpr int kThreads = 64;
constexpr unsigned kFullMask = 0xffffffff;

__device__ int global_index() {
  return static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
}

template <bool good>
__global__ void out_of_bounds_write(const float* x, float* out) {
  const int i = global_index();
  out[i] = x[i];
  if (!good) out[i + 1] = x[i];
}

// The write is in another function than the declaration; the report names both.
__device__ void store(float* buffer, unsigned i, float value) {
  buffer[i] = value;
}

template <bool good>
__global__ void shared_overrun(const float* x, float* out) {
  AMPFUSE_SHARED(float, buffer, kThreads);
  store(buffer, threadIdx.x + !good, x[global_index()]);
  __syncthreads();
  out[global_index()] = good ? buffer[threadIdx.x] : 1;
}

template <bool good>
__global__ void shared_index(const float* x, float* out) {
  AMPFUSE_SHARED(float, buffer, kThreads);
  buffer[threadIdx.x + !good] = x[global_index()];
  __syncthreads();
  out[global_index()] = good ? buffer[threadIdx.x] : 1;
}

template <bool good>
__global__ void dynamic_shared_overrun(const float* x, float* out) {
  AMPFUSE_DYNAMIC_SHARED(float, buffer);
  buffer[threadIdx.x + !good] = x[global_index()];
  out[global_index()] = 1;
}

template <bool good>
__global__ void uninitialised_shared(const float* x, float* out) {
  AMPFUSE_SHARED(float, buffer, kThreads);
  if (good || threadIdx.x < kThreads / 2) buffer[threadIdx.x] = x[global_index()];
  out[global_index()] = buffer[threadIdx.x];
}

template <bool good>
__global__ void misaligned_vector(const float* x, float* out) {
  const float4 four = *reinterpret_cast<const float4*>(x + (good ? 0 : 1));
  out[global_index()] = four.y;
}

__device__ float recurse(float x, int depth) {
  volatile float frame[256] = {x};
  return depth == 0 ? frame[0] : recurse(frame[0], depth - 1) + frame[1];
}

template <bool good>
__global__ void stack_overflow(const float* x, float* out) {
  out[global_index()] = recurse(x[global_index()], good ? 10 : 1000);
}

// The second round may overwrite values that a slower thread has yet to read in the first. The
// result is still right, because every round writes the same values.
template <bool good>
__global__ void missing_trailing_barrier(const float* x, float* out) {
  AMPFUSE_SHARED(float, buffer, kThreads);
  for (int round = 0; round < 2; ++round) {
    buffer[threadIdx.x] = x[global_index()];
    __syncthreads();
    out[global_index()] = buffer[threadIdx.x ^ 1];
    if (good) __syncthreads();
  }
}

// Thread i of one block races with thread i of another.
template <bool good>
__global__ void inter_block_race(const float* x, float* out) {
  out[global_index()] = x[global_index()];
  if (!good) out[threadIdx.x] = 1;
}

__device__ unsigned tickets = 0;

// The last block to take a ticket reads what the other blocks wrote.
template <bool good>
__global__ void missing_fence(const float* x, float* out) {
  AMPFUSE_SHARED(bool, is_last, 1);
  out[global_index()] = x[global_index()];
  __syncthreads();
  if (threadIdx.x == 0) {
    if (good) __threadfence();
    is_last[0] = atomicAdd(&tickets, 1) % gridDim.x == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last[0]) return;
  const unsigned other_block = (global_index() + kThreads) % (gridDim.x * blockDim.x);
  out[global_index()] = out[other_block];
}

template <bool good>
__global__ void shuffle_is_no_fence(const float* x, float* out) {
  AMPFUSE_SHARED(float, buffer, kThreads);
  buffer[threadIdx.x] = x[global_index()];
  if (good)
    __syncwarp();
  else
    __shfl_xor_sync(kFullMask, 0, 1);
  out[global_index()] = buffer[threadIdx.x ^ 1];
}

template <bool good>
__global__ void divergent_trip_count(const float* x, float* out) {
  const unsigned rounds = good ? 2 : 1 + threadIdx.x % 2;
  for (unsigned i = 0; i < rounds; ++i) __syncthreads();
  out[global_index()] = x[global_index()];
}

template <bool good>
__global__ void barrier_in_branches(const float* x, float* out) {
  if (good || threadIdx.x < 10)
    __syncthreads();
  else
    __syncthreads();
  out[global_index()] = x[global_index()];
}

template <bool good>
__global__ void lane_exited(const float* x, float* out) {
  out[global_index()] = 1;
  if (!good && threadIdx.x == 37) return;
  out[global_index()] = __shfl_xor_sync(kFullMask, x[global_index()], 1);
}

template <bool good>
__global__ void lane_elsewhere(const float* x, float* out) {
  out[global_index()] = x[global_index()];
  if (threadIdx.x % 32 < 16)
    out[global_index()] = __shfl_xor_sync(good ? 0x0000ffff : kFullMask, x[global_index()], 1);
  __syncthreads();
}

template <bool good>
__global__ void mask_without_caller(const float* x, float* out) {
  out[global_index()] = __shfl_xor_sync(good ? kFullMask : 0x0000ffff, x[global_index()], 1);
}

template <bool good>
__global__ void disagreeing_masks(const float* x, float* out) {
  const unsigned mask = good || threadIdx.x % 32 < 16 ? kFullMask : 0xffff0000;
  out[global_index()] = __shfl_xor_sync(mask, x[global_index()], 1);
}

template <bool good>
__global__ void source_outside_mask(const float* x, float* out) {
  const unsigned mask = threadIdx.x % 32 < 16 ? 0x0000ffff : 0xffff0000;
  out[global_index()] = __shfl_xor_sync(mask, x[global_index()], good ? 1 : 16);
}

using Kernel = void (*)(const float*, float*);
struct Case {
  const char* name;
  Kernel bad, good;
};
#define CASE(name) {#name, name<false>, name<true>}
constexpr Case kCases[] = {
    CASE(out_of_bounds_write),  CASE(shared_overrun),
    CASE(shared_index),         CASE(dynamic_shared_overrun),
    CASE(uninitialised_shared), CASE(misaligned_vector),
    CASE(stack_overflow),       CASE(missing_trailing_barrier),
    CASE(inter_block_race),     CASE(missing_fence),
    CASE(shuffle_is_no_fence),  CASE(divergent_trip_count),
    CASE(barrier_in_branches),  CASE(lane_exited),
    CASE(lane_elsewhere),       CASE(mask_without_caller),
    CASE(disagreeing_masks),    CASE(source_outside_mask),
};

// Returns false if the kernel does not fill `out` with ones.
bool is_right(const char* name, Kernel kernel) {
  constexpr unsigned kBlocks = 2;
  const std::vector<float> x(kBlocks * kThreads, 1.0f);
  std::vector<float> out(x.size());
  simt::launch(kernel, kBlocks, kThreads, kThreads * sizeof(float), x.data(), out.data());
  for (std::size_t i = 0; i < out.size(); ++i) {
    if (out[i] == 1) continue;
    std::fprintf(stderr, "%s: wrong result: out[%zu] = %g\n", name, i, out[i]);
    return false;
  }
  return true;
}

}  // namespace

int main(int argc, char** argv) try {
  bool right = true;
  for (const auto& [name, bad, good] : kCases) {
    if (argc > 1) {
      if (std::strcmp(argv[1], name) == 0) right = is_right(name, bad);
    } else {
      simt::for_each_schedule([&] { right = is_right(name, good) && right; });
    }
  }
  if (right) std::puts("finished without complaint");
  return right ? 0 : 1;
} catch (const simt::Error& error) {
  std::fprintf(stderr, "%s\n", error.what());
  return 1;
}
