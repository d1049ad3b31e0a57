#pragma once

// Arithmetic under math/ is compiled by nvcc for the GPU and by the host compiler for the CPU.
// There it must be inlined for good: the CPU kernels are compiled once per instruction set, and of
// an out-of-line copy the linker would keep any one, AVX-512 on a machine without it included.
#if defined(__CUDACC__)
#define AMPFUSE_HOST_DEVICE __host__ __device__ __forceinline__
#else
#define AMPFUSE_HOST_DEVICE inline __attribute__((always_inline))
#endif
