#pragma once

// Marks arithmetic under math/, which nvcc compiles for the GPU and the host compiler for the CPU.
// On the CPU it must always be inlined. The CPU kernels are compiled once per instruction set, and
// of several out-of-line copies the linker would keep any one, possibly the AVX-512 copy on a
// machine without AVX-512.
#if defined(__CUDACC__)
#define AMPFUSE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define AMPFUSE_HOST_DEVICE inline __attribute__((always_inline))
#endif
