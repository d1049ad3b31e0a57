// Launches kernels on torch's current stream of the tensors' device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>

#include "launch.cuh"

namespace ampfuse {

/// The attributes of a launch in clusters. Blocks of a cluster go to different multiprocessors if
/// possible: on one, they would read and write at the same time, instead of in turns.
class ClusterAttributes {
 public:
  explicit ClusterAttributes(int blocks) {
    attributes_[0].id = cudaLaunchAttributeClusterDimension;
    attributes_[0].val.clusterDim = {static_cast<unsigned>(blocks), 1, 1};
    attributes_[1].id = cudaLaunchAttributeClusterSchedulingPolicyPreference;
    attributes_[1].val.clusterSchedulingPolicyPreference = cudaClusterSchedulingPolicySpread;
  }

  /// Returns a configuration that points to this object.
  cudaLaunchConfig_t config(int blocks, int threads, int shared, cudaStream_t stream) {
    return {static_cast<unsigned>(blocks),
            static_cast<unsigned>(threads),
            static_cast<size_t>(shared),
            stream,
            attributes_,
            2};
  }

 private:
  cudaLaunchAttribute attributes_[2] = {};
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

  /// Returns how many clusters of blocks can be resident at a time. A cluster runs on one group of
  /// multiprocessors, so a few blocks of each group may be left over. Returns 0 if the kernel
  /// cannot be launched in clusters: the device has none, or the kernel was compiled for older
  /// devices, or this process may use only parts of the device. GeForce 50 (12.x) has clusters, but
  /// they are not used before somebody has tried it: its drivers are said to reserve gigabytes for
  /// them.
  template <typename... Parameters>
  int resident_clusters(void (*kernel)(Parameters...), int cluster, int threads, int shared) const {
    const int major = attribute(cudaDevAttrComputeCapabilityMajor);
    if (major != 9 && major != 10) return 0;
    cudaFuncAttributes code;
    C10_CUDA_CHECK(cudaFuncGetAttributes(&code, kernel));
    if (code.ptxVersion < 90) return 0;
    ClusterAttributes attributes(cluster);
    const cudaLaunchConfig_t config = attributes.config(cluster, threads, shared, stream_);
    int clusters = 0;
    C10_CUDA_CHECK(cudaOccupancyMaxActiveClusters(&clusters, kernel, &config));
    return clusters;
  }

  /// Launches kernel(arguments...) in clusters of `cluster` blocks. `shared` must need no higher
  /// limit.
  template <typename... Parameters, typename... Arguments>
  void launch_clusters(void (*kernel)(Parameters...), int cluster, int blocks, int threads,
                       int shared, Arguments&&... arguments) const {
    ClusterAttributes attributes(cluster);
    const cudaLaunchConfig_t config = attributes.config(blocks, threads, shared, stream_);
    C10_CUDA_CHECK(cudaLaunchKernelEx(&config, kernel, std::forward<Arguments>(arguments)...));
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
