// CUDA's keywords, built-in variables and vector types, as nvcc defines them.
#pragma once

#define __global__
#define __device__
#define __host__
#define __forceinline__ inline
#define __launch_bounds__(...)
#define __grid_constant__

// Vector types have CUDA's sizes and alignments: a misaligned access is undefined here as in CUDA,
// and UBSan reports it.
struct uint3 {
  unsigned x, y, z;
};
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

struct dim3 {
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr unsigned long long count() const { return 1ull * x * y * z; }
  unsigned x, y, z;
};

namespace simt::runtime {
// Indices and sizes of the running CUDA thread; the scheduler writes them at each switch.
inline uint3 thread_index, block_index;
inline dim3 block_dim, grid_dim;
inline unsigned cluster_dim = 1;
}  // namespace simt::runtime

inline const uint3& threadIdx = simt::runtime::thread_index;
inline const uint3& blockIdx = simt::runtime::block_index;
inline const dim3& blockDim = simt::runtime::block_dim;
inline const dim3& gridDim = simt::runtime::grid_dim;
inline constexpr int warpSize = 32;
