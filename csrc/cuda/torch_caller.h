// Calls libampfuse_cuda on torch's current stream of the tensors' device.
#pragma once

#include <ATen/core/Tensor.h>
#include <c10/core/DeviceGuard.h>

#include <vector>

#include "caller.h"

namespace ampfuse {

/// Torch's caching allocator reuses the memory of a call only on the same stream, so it may be
/// freed before the kernels finish.
class TorchCaller final : public CudaCaller {
 public:
  /// While the object exists, the tensor's device is the current one.
  explicit TorchCaller(const at::Tensor& tensor);

  void* allocate(size_t bytes) override;
  [[noreturn]] void fail(int error, const char* text) override;

 private:
  c10::DeviceGuard guard_;
  std::vector<at::Tensor> memory_;
};

}  // namespace ampfuse
