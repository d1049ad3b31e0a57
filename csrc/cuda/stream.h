// Launches kernels on torch's current stream of the tensors' device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>

#include <algorithm>

#include "launch.cuh"

namespace ampfuse {

class LaunchStream {
 public:
  explicit LaunchStream(const at::Tensor& tensor)
      : guard_(tensor.device()),
        stream_(c10::cuda::getCurrentCUDAStream()),
        multiprocessors_(attribute(cudaDevAttrMultiProcessorCount)) {}

  /// Launches kernel(arguments...) with a warp for each unit of work, or as many warps as fit.
  template <typename... Parameters, typename... Arguments>
  void launch(void (*kernel)(Parameters...), int64_t warps, Arguments&&... arguments) const {
    launch_blocks(kernel, grid_size(warps, multiprocessors_), kThreads, 0,
                  std::forward<Arguments>(arguments)...);
  }

  /// Launches kernel(arguments...); `shared` is in bytes of dynamic shared memory per block.
  template <typename... Parameters, typename... Arguments>
  void launch_blocks(void (*kernel)(Parameters...), int blocks, int threads, int shared,
                     Arguments&&... arguments) const {
    if (must_ask_for_shared(shared)) {
      // The limit belongs to the kernel, not to the launch. So it is always raised to the maximum:
      // another thread may launch the same kernel with more shared memory.
      const auto most =
          static_cast<int>(most_shared(attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin)));
      C10_CUDA_CHECK(
          cudaFuncSetAttribute(kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, most));
    }
    kernel<<<blocks, threads, shared, stream_>>>(std::forward<Arguments>(arguments)...);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }

  /// Returns true if this kernel can be launched in clusters of blocks: the device has clusters,
  /// and the kernel's code was not compiled for older GPUs.
  template <typename... Parameters>
  bool has_clusters(void (*kernel)(Parameters...)) const {
    if (attribute(cudaDevAttrClusterLaunch) == 0) return false;
    cudaFuncAttributes code;
    C10_CUDA_CHECK(cudaFuncGetAttributes(&code, kernel));
    return code.ptxVersion >= 90;
  }

  /// Launches kernel(arguments...) in clusters of `cluster` blocks. Returns the number of blocks:
  /// at most `blocks`, and no more than can be resident at a time.
  template <typename... Parameters, typename... Arguments>
  int launch_clusters(void (*kernel)(Parameters...), int blocks, int cluster, int threads,
                      int shared, Arguments&&... arguments) const {
    cudaLaunchAttribute size = {};
    size.id = cudaLaunchAttributeClusterDimension;
    size.val.clusterDim = {static_cast<unsigned>(cluster), 1, 1};
    cudaLaunchConfig_t config = {};
    config.gridDim = blocks;
    config.blockDim = threads;
    config.dynamicSmemBytes = shared;
    config.stream = stream_;
    config.attrs = &size;
    config.numAttrs = 1;
    // A cluster runs on one group of multiprocessors, so the blocks of a group that do not make a
    // whole cluster are left out.
    int resident = 0;
    C10_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&resident, kernel, &config));
    blocks = std::min(blocks, std::max(resident, 1) * cluster);
    config.gridDim = blocks;
    C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
    return blocks;
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
