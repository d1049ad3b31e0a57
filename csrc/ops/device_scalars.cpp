#include "device_scalars.h"

#include <ATen/ops/amax.h>
#include <ATen/ops/stack.h>

namespace ampfuse {

at::Tensor largest(const std::vector<at::Tensor>& flags, at::Device device) {
  std::vector<at::Tensor> there;
  there.reserve(flags.size());
  for (const at::Tensor& flag : flags) there.push_back(on_device(flag, device));
  return there.size() == 1 ? there[0] : at::stack(there).amax();
}

}  // namespace ampfuse
