#include "torch_caller.h"

#include <ATen/ops/empty.h>
#include <c10/core/impl/VirtualGuardImpl.h>
#include <c10/util/Exception.h>

#include <string>

#include "../tensors/capture.h"

namespace ampfuse {

namespace {

// Returns torch's interface to the streams of CUDA. It is that of all kinds of devices, and needs
// none of torch's CUDA libraries, so libampfuse also loads with a CPU build of torch.
const c10::impl::VirtualGuardImpl& streams() {
  static const c10::impl::VirtualGuardImpl streams(c10::DeviceType::CUDA);
  return streams;
}

void* current_stream(c10::Device device) {
  return streams().getStreamNativeHandle(streams().getStream(device));
}

constexpr int kInsufficientDriver = 35;  // cudaErrorInsufficientDriver

bool is_capturing_on_current_device() {
  return is_stream_capturing(current_stream(streams().getDevice()));
}

[[maybe_unused]] const bool is_set = (set_capture_query(is_capturing_on_current_device), true);

}  // namespace

TorchCaller::TorchCaller(const at::Tensor& tensor)
    : CudaCaller(tensor.device().index(), current_stream(tensor.device())),
      guard_(tensor.device()) {}

void* TorchCaller::allocate(size_t bytes) {
  const auto options =
      at::TensorOptions().device(c10::DeviceType::CUDA, static_cast<c10::DeviceIndex>(device));
  memory_.push_back(at::empty({static_cast<int64_t>(bytes)}, options.dtype(at::kByte)));
  return memory_.back().mutable_data_ptr();
}

void TorchCaller::fail(int error, const char* text) {
  std::string message = std::string("CUDA error: ") + text;
  if (error == kInsufficientDriver) {
    message += std::string(". ampfuse's kernels were compiled with CUDA ") +
               kernels_cuda_version() +
               ": install a driver for it, or compile them with an older CUDA";
  }
  throw c10::AcceleratorError({__func__, __FILE__, static_cast<uint32_t>(__LINE__)}, error,
                              message);
}

}  // namespace ampfuse
