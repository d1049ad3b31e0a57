// Lets a kernel start before the kernel in front of it has finished (CUDA calls this programmatic
// dependent launch; GPUs have it from compute capability 9.0 on). Its blocks are placed on
// multiprocessors and read their arguments while the other kernel runs, which would otherwise take
// about a microsecond between two kernels.
//
// A kernel that is launched with LaunchShape::starts_early calls wait_for_kernel_before() before it
// reads or writes device memory. So it sees all that earlier kernels wrote, and cannot overwrite
// what they read. This holds for a chain of such kernels, too, since each finishes only after the
// one before it. Tests that run kernels on the CPU define both functions differently.
#pragma once

#if defined(__CUDACC__)

namespace ampfuse {

// Lets the blocks of the next kernel be placed as soon as all blocks of this one have called it.
// Without this call, they are placed when these blocks end. Only for kernels that are short and
// leave room on the multiprocessors.
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
