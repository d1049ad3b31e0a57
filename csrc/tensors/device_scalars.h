// Groups tensors by device, copies scalars between devices, and combines scalars of several
// devices.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace ampfuse {

/// Copies a scalar to `device` unless it is there. The host waits only if `device` is the CPU,
/// where the value may be read at once.
inline at::Tensor on_device(const at::Tensor& scalar, at::Device device) {
  return scalar.to(device, scalar.scalar_type(), /*non_blocking=*/!device.is_cpu());
}

/// Returns the element of `all` for this device, and appends one if it is missing: elements are in
/// order of first appearance. OfDevice is a struct whose first member is `device`.
template <typename OfDevice>
OfDevice& entry_for_device(std::vector<OfDevice>& all, at::Device device) {
  for (OfDevice& entry : all) {
    if (entry.device == device) return entry;
  }
  return all.emplace_back(OfDevice{device});
}

struct DeviceTensors {
  at::Device device;
  std::vector<at::Tensor> tensors = {};
};

/// Returns one list per device, in order of first appearance.
std::vector<DeviceTensors> by_device(at::TensorList tensors);

/// Combines norms of order `ord` into the norm of all their tensors together, on the device of the
/// first norm. `norms` must not be empty.
at::Tensor joined_norm(std::vector<at::Tensor> norms, double ord = 2);

/// Returns the largest of the flags, on this device. `flags` must not be empty.
at::Tensor largest(const std::vector<at::Tensor>& flags, at::Device device);

}  // namespace ampfuse
