// Where launches go: torch's current stream on the tensors' device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/cuda/CUDAFunctions.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/cuda/CUDAStream.h>
#include <cuda_runtime.h>

#include "launch.cuh"

namespace ampfuse {

class LaunchStream {
 public:
  explicit LaunchStream(const at::Tensor& tensor)
      : guard_(tensor.device()), stream_(c10::cuda::getCurrentCUDAStream()) {
    C10_CUDA_CHECK(cudaDeviceGetAttribute(&multiprocessors_, cudaDevAttrMultiProcessorCount,
                                          tensor.device().index()));
  }

  /// Runs kernel(arguments...) with a warp for each unit of work, or as many as fit.
  template <typename... Parameters, typename... Arguments>
  void launch(void (*kernel)(Parameters...), int64_t warps, Arguments&&... arguments) const {
    kernel<<<grid_size(warps, multiprocessors_), kThreads, 0, stream_>>>(
        std::forward<Arguments>(arguments)...);
    C10_CUDA_KERNEL_LAUNCH_CHECK();
  }

 private:
  c10::cuda::CUDAGuard guard_;
  c10::cuda::CUDAStream stream_;
  int multiprocessors_ = 0;
};

}  // namespace ampfuse
