// 0-dim tensors on their way between devices.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace ampfuse {

/// Copied, if need be, without the host waiting; but to the CPU the copy must have arrived before
/// it is read.
inline at::Tensor on_device(const at::Tensor& scalar, at::Device device) {
  return scalar.to(device, scalar.scalar_type(), /*non_blocking=*/!device.is_cpu());
}

/// The largest of flags, on this device.
at::Tensor largest(const std::vector<at::Tensor>& flags, at::Device device);

}  // namespace ampfuse
