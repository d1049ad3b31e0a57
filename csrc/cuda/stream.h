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
  /// Starts before the previous launch has finished, if the device can do so. The kernel must call
  /// wait_for_kernel_before() (early_start.cuh). What comes before it in the stream must be a
  /// kernel of the same call that waits, too, or was not started early.
  bool starts_early = false;
};

/// The configuration of a launch, and the attribute to which it points.
class LaunchConfig {
 public:
  LaunchConfig(const LaunchShape& shape, bool starts_early, cudaStream_t stream) {
    config_ = {static_cast<unsigned>(shape.blocks),
               static_cast<unsigned>(shape.threads),
               static_cast<size_t>(shape.shared),
               stream,
               &attribute_,
               0};
    if (!starts_early) return;
    attribute_.id = cudaLaunchAttributeProgrammaticStreamSerialization;
    attribute_.val.programmaticStreamSerializationAllowed = 1;
    config_.numAttrs = 1;
  }
  LaunchConfig(const LaunchConfig&) = delete;
  LaunchConfig& operator=(const LaunchConfig&) = delete;

  const cudaLaunchConfig_t* get() const { return &config_; }

 private:
  cudaLaunchAttribute attribute_ = {};
  cudaLaunchConfig_t config_;
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
    launch(kernel, shape(warps), std::forward<Arguments>(arguments)...);
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
    const LaunchConfig config(shape, shape.starts_early && can_start_early(kernel), stream_);
    C10_CUDA_CHECK(cudaLaunchKernelEx(config.get(), kernel, std::forward<Arguments>(arguments)...));
  }

  /// Returns the shape of a launch with a warp for each unit of work, or as many warps as fit.
  LaunchShape shape(int64_t warps) const { return {grid_size(warps, multiprocessors_)}; }

  int multiprocessors() const { return multiprocessors_; }

  int attribute(cudaDeviceAttr name) const {
    int value = 0;
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&value, name, stream_.device_index()));
    return value;
  }

 private:
  /// GPUs have early starts since compute capability 9.0; those of 12.x are left out until somebody
  /// has tried it. Drivers capture such launches in CUDA graphs from CUDA 12.3 on. Code that the
  /// driver compiled from code for older devices does not wait; `ptxVersion` is the compute
  /// capability that it was written for.
  template <typename... Parameters>
  bool can_start_early(void (*kernel)(Parameters...)) const {
    const int major = attribute(cudaDevAttrComputeCapabilityMajor);
    if (major != 9 && major != 10) return false;
    int driver = 0;
    C10_CUDA_CHECK(cudaDriverGetVersion(&driver));
    cudaFuncAttributes code;
    C10_CUDA_CHECK(cudaFuncGetAttributes(&code, kernel));
    return driver >= 12030 && code.ptxVersion >= 90;
  }

  c10::cuda::CUDAGuard guard_;
  c10::cuda::CUDAStream stream_;
  int multiprocessors_;
};

}  // namespace ampfuse
