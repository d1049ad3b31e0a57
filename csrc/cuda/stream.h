// Launches kernels on torch's current stream of the tensors' device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>

#include "launch.cuh"

namespace ampfuse {

struct LaunchShape {
  int blocks;
  int threads = kThreads;
  int shared = 0;  // bytes of dynamic shared memory per block
};

class LaunchStream {
 public:
  explicit LaunchStream(const at::Tensor& tensor)
      : guard_(tensor.device()),
        stream_(c10::cuda::getCurrentCUDAStream()),
        multiprocessors_(attribute(cudaDevAttrMultiProcessorCount)) {}

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
      C10_CUDA_CHECK(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    }
    kernel<<<shape.blocks, shape.threads, shape.shared, stream_>>>(
        std::forward<Arguments>(arguments)...);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }

  int multiprocessors() const { return multiprocessors_; }

  int attribute(cudaDeviceAttr name) const {
    int value = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, stream_.device_index()));
    return value;
  }

 private:
  c10::cuda::CUDAGuard guard_;
  c10::cuda::CUDAStream stream_;
  int multiprocessors_;
};

}  // namespace ampfuse
