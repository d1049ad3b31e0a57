// Lets a kernel start before the kernel in front of it has finished (CUDA calls this programmatic
// dependent launch; GPUs have it from compute capability 9.0 on). Otherwise about a microsecond
// passes between two kernels, which is much of a short call.
//
// The first kernel calls let_next_kernel_start(). Then the blocks of the second one are placed on
// multiprocessors and read their arguments while the first one runs. All blocks of the second
// kernel, which is launched with LaunchShape::starts_early, call wait_for_kernel_before() before
// they use device memory or end. So the second kernel sees all that earlier kernels wrote, cannot
// overwrite what they read, and ends after them. Tests that run kernels on the CPU define both
// functions differently.
#pragma once

#if defined(__CUDACC__)

namespace ampfuse {

// Lets the blocks of the next kernel be placed as soon as all blocks of this one have called it, or
// have ended. Only for short kernels, since blocks that wait occupy multiprocessors.
__device__ __forceinline__ void let_next_kernel_start() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.launch_dependents;" :::);
#endif
}

// Waits until the kernel before this one has finished and its writes can be read. Returns at once
// if this kernel did not start early.
__device__ __forceinline__ void wait_for_kernel_before() {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
  asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

}  // namespace ampfuse

#endif
