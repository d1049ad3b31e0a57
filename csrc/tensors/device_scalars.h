// Tensors on several devices: sorted by them, and 0-dim ones on their way between them.
#pragma once

#include <ATen/core/Tensor.h>

#include <vector>

namespace ampfuse {

/// Copied, if need be, without the host waiting; but to the CPU the copy must have arrived before
/// it is read.
inline at::Tensor on_device(const at::Tensor& scalar, at::Device device) {
  return scalar.to(device, scalar.scalar_type(), /*non_blocking=*/!device.is_cpu());
}

/// Of a list of structs that begin with a device the one for this device, added if there is none:
/// so they are in order of appearance.
template <typename OfDevice>
OfDevice& part_for(std::vector<OfDevice>& all, at::Device device) {
  for (OfDevice& part : all) {
    if (part.device == device) return part;
  }
  return all.emplace_back(OfDevice{device});
}

/// The norm of what several norms of this type measured, on the device of the first. At least one.
at::Tensor joined_norm(std::vector<at::Tensor> norms, double norm_type = 2);

/// The largest of flags, on this device.
at::Tensor largest(const std::vector<at::Tensor>& flags, at::Device device);

}  // namespace ampfuse
