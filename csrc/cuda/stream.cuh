// Launches kernels on the stream of a caller.
#pragma once

#include <cuda_runtime.h>

#include <utility>

#include "caller.h"
#include "launch.cuh"

namespace ampfuse {

/// Throws the error of a call of CUDA, if it is one.
inline void check_cuda(CudaCaller& caller, cudaError_t error) {
  if (error == cudaSuccess) return;
  cudaGetLastError();  // or the next launch would report it again
  caller.fail(error, cudaGetErrorString(error));
}

/// Makes the caller's device the current one of this CUDA runtime; torch has its own. A device that
/// is current already is left alone, since setting it would replace a green context.
inline void set_device(CudaCaller& caller) {
  int current = -1;
  check_cuda(caller, cudaGetDevice(&current));
  if (current != caller.device) check_cuda(caller, cudaSetDevice(caller.device));
}

struct LaunchShape {
  int blocks;
  int threads = kThreads;
  int shared = 0;  // bytes of dynamic shared memory per block
};

class LaunchStream {
 public:
  explicit LaunchStream(CudaCaller& caller)
      : caller_(caller), stream_(static_cast<cudaStream_t>(caller.stream)) {
    set_device(caller_);
    multiprocessors_ = attribute(cudaDevAttrMultiProcessorCount);
  }

  /// Launches kernel(arguments...) with a warp for each unit of work, or as many warps as fit.
  template <typename... Parameters, typename... Arguments>
  void launch(void (*kernel)(Parameters...), int64_t warps, Arguments&&... arguments) const {
    const LaunchShape shape = {grid_size(warps, multiprocessors_)};
    launch(kernel, shape, std::forward<Arguments>(arguments)...);
  }

  /// Launches kernel(arguments...).
  template <typename... Parameters, typename... Arguments>
  void launch(void (*kernel)(Parameters...), const LaunchShape& shape,
              Arguments&&... arguments) const {
    if (must_ask_for_shared(shape.shared)) {
      // The limit belongs to the kernel, not to the launch. So it is always raised to the maximum:
      // another thread may launch the same kernel with more shared memory.
      const auto most =
          static_cast<int>(most_shared(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)));
      check(cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    }
    AMPFUSE_LAUNCH(kernel, shape.blocks, shape.threads, shape.shared, stream_)
    (std::forward<Arguments>(arguments)...);
    check(cudaGetLastError());
  }

  /// Sets the first bytes of memory to 0.
  void clear(void* memory, size_t bytes) const {
    check(cudaMemsetAsync(memory, 0, bytes, stream_));
  }

  int multiprocessors() const { return multiprocessors_; }

  int attribute(cudaDeviceAttr name) const {
    int value = 0;
    check(cudaDeviceGetAttribute(&value, name, caller_.device));
    return value;
  }

 private:
  void check(cudaError_t error) const { check_cuda(caller_, error); }

  CudaCaller& caller_;
  cudaStream_t stream_;
  int multiprocessors_ = 0;
};

}  // namespace ampfuse
