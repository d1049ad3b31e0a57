#pragma once

// Marks functions that are compiled by nvcc for the GPU and by the host compiler for the CPU. On
// the CPU they must be inlined: the CPU kernels are compiled once per instruction set, and if a
// function had a copy in each of them, the linker would keep only one. That could be the AVX-512
// copy, which crashes on a machine without AVX-512.
#if defined(__CUDACC__)
#define AMPFUSE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define AMPFUSE_HOST_DEVICE inline __attribute__((always_inline))
#endif
