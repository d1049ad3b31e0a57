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
struct alignas(16) float4 {
  float x, y, z, w;
};
struct alignas(8) uint2 {
  unsigned x, y;
};
struct alignas(16) uint4 {
  unsigned x, y, z, w;
};

namespace simt::runtime {
// No kernel has a grid or block of more than one dimension.
struct Dimensions {
  unsigned x;
};
// Indices and sizes of the running CUDA thread; the scheduler writes them at each switch.
inline Dimensions thread_index, block_index, block_dim, grid_dim;
}  // namespace simt::runtime

inline const auto& threadIdx = simt::runtime::thread_index;
inline const auto& blockIdx = simt::runtime::block_index;
inline const auto& blockDim = simt::runtime::block_dim;
inline const auto& gridDim = simt::runtime::grid_dim;
inline constexpr unsigned warpSize = 32;
