#include "device_scalars.h"

#include <ATen/ops/stack.h>
#include <ampfuse/multi_tensor_norm.h>

namespace ampfuse {

std::vector<DeviceTensors> by_device(at::TensorList tensors) {
  std::vector<DeviceTensors> lists;
  for (const at::Tensor& tensor : tensors) {
    entry_for_device(lists, tensor.device()).tensors.push_back(tensor);
  }
  return lists;
}

at::Tensor joined_norm(std::vector<at::Tensor> norms, double ord) {
  if (norms.size() == 1) return norms[0];
  for (at::Tensor& norm : norms) norm = on_device(norm, norms[0].device());
  return multi_tensor_norm(norms, ord).total_norm;
}

at::Tensor largest(const std::vector<at::Tensor>& flags, at::Device device) {
  std::vector<at::Tensor> there;
  there.reserve(flags.size());
  for (const at::Tensor& flag : flags) there.push_back(on_device(flag, device));
  return there.size() == 1 ? there[0] : at::stack(there).amax();
}

}  // namespace ampfuse
