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
struct alignas(8) float2 {
  float x, y;
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
struct alignas(8) int2 {
  int x, y;
};
struct alignas(16) int4 {
  int x, y, z, w;
};
struct alignas(16) double2 {
  double x, y;
};

inline float2 make_float2(float x, float y) {
  return {x, y};
}
inline float4 make_float4(float x, float y, float z, float w) {
  return {x, y, z, w};
}
inline uint2 make_uint2(unsigned x, unsigned y) {
  return {x, y};
}
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) {
  return {x, y, z, w};
}
inline int2 make_int2(int x, int y) {
  return {x, y};
}
inline int4 make_int4(int x, int y, int z, int w) {
  return {x, y, z, w};
}
inline double2 make_double2(double x, double y) {
  return {x, y};
}

struct dim3 {
  constexpr dim3(unsigned x_ = 1, unsigned y_ = 1, unsigned z_ = 1) : x(x_), y(y_), z(z_) {}
  constexpr unsigned long long count() const { return 1ull * x * y * z; }
  unsigned x, y, z;
};

namespace simt::runtime {
// Indices and sizes of the running CUDA thread; the scheduler writes them at each switch.
inline uint3 thread_index, block_index;
inline dim3 block_dim, grid_dim;
}  // namespace simt::runtime

inline const uint3& threadIdx = simt::runtime::thread_index;
inline const uint3& blockIdx = simt::runtime::block_index;
inline const dim3& blockDim = simt::runtime::block_dim;
inline const dim3& gridDim = simt::runtime::grid_dim;
inline constexpr int warpSize = 32;
