#include "gradients.h"

#include <ATen/ops/zeros.h>
#include <ampfuse/multi_tensor_unscale.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/distributed/c10d/ProcessGroup.hpp>

#include "../tensors/device_scalars.h"
#include "../tensors/dtype_name.h"
#include "../tensors/tensor_list.h"

namespace ampfuse::amp {

namespace {

struct DeviceGradients {
  at::Device device;
  std::vector<at::Tensor> params = {};
  std::vector<at::Tensor> grads = {};
};

struct Gradients {
  std::vector<DeviceGradients> parts = {};
  bool are_dense = true;  // false if a gradient is sparse: `parts` then has only its values
};

// Returns the tensor to unscale: the gradient, or the values of a sparse one.
at::Tensor dense_part(const at::Tensor& param) {
  if (!param.grad().is_sparse()) return param.grad();
  // Several entries may have the same index, and the sum of finite entries may overflow, most
  // likely in fp16. So the entries of fp16 gradients are added up first.
  if (param.grad().scalar_type() == at::kHalf) param.mutable_grad() = param.grad().coalesce();
  return param.grad()._values();
}

Gradients collect_gradients(const torch::optim::Optimizer& optimizer, bool allow_fp16) {
  Gradients all;
  const auto& groups = optimizer.param_groups();
  for (size_t group = 0; group < groups.size(); ++group) {
    const std::vector<at::Tensor>& params = groups[group].params();
    for (size_t index = 0; index < params.size(); ++index) {
      const at::Tensor& param = params[index];
      if (!param.grad().defined()) continue;
      resolve_conjugate_grad(param);
      TORCH_CHECK_VALUE(allow_fp16 || param.grad().scalar_type() != at::kHalf,
                        "Attempting to unscale FP16 gradients. Parameter ", index, " of group ",
                        group, ", whose gradient is float16, is ", dtype_name(param.scalar_type()),
                        " of shape ", param.sizes(),
                        ": keep parameters in float32 under autocast, or set allow_fp16_grads for "
                        "an optimizer that has masters");
      const at::Tensor grad = dense_part(param);
      all.are_dense = all.are_dense && grad.is_same(param.grad());
      DeviceGradients& part = entry_for_device(all.parts, grad.device());
      part.params.push_back(param);
      part.grads.push_back(grad);
    }
  }
  return all;
}

// Returns one flag for all ranks, the largest of theirs: all of them skip the step, or none does.
// Ranks without gradients take part too.
at::Tensor flag_of_all_ranks(const std::vector<at::Tensor>& flags, at::Device device,
                             c10d::ProcessGroup& process_group) {
  std::vector<at::Tensor> flag = {flags.empty()
                                      ? at::zeros({}, at::TensorOptions(device).dtype(at::kFloat))
                                      : largest(flags, device).clone()};
  c10d::AllreduceOptions options;
  options.reduceOp = c10d::ReduceOp::MAX;
  process_group.allreduce(flag, options)->wait();
  return flag[0];
}

}  // namespace

Inspection inspect(const torch::optim::Optimizer& optimizer, const at::Tensor& inv_scale,
                   const at::Tensor& found_inf, bool allow_fp16,
                   const c10::intrusive_ptr<c10::intrusive_ptr_target>& process_group) {
  const c10::NoGradGuard no_grad;
  Inspection inspection;
  const Gradients all = collect_gradients(optimizer, allow_fp16);
  inspection.has_whole_norms = !process_group && all.are_dense;
  for (const DeviceGradients& part : all.parts) {
    const at::Tensor flag = on_device(found_inf, part.device);
    // Norms are double: that of scaled gradients may exceed the range of float though no element
    // does.
    const UnscaledNorm result = multi_tensor_unscale_norm(
        part.grads, flag, on_device(inv_scale, part.device), /*ord=*/2, at::kDouble);
    for (const at::Tensor& param : part.params) {
      inspection.params.emplace_back(param.getIntrusivePtr());
    }
    inspection.norms.push_back(result.norms);
    inspection.total_norms.push_back(result.total_norm);
    inspection.found_infs.push_back(flag);
  }
  if (process_group) {
    inspection.found_infs = {flag_of_all_ranks(inspection.found_infs, inv_scale.device(),
                                               dynamic_cast<c10d::ProcessGroup&>(*process_group))};
  }
  return inspection;
}

std::vector<at::Tensor> params_of(const torch::optim::Optimizer& optimizer) {
  std::vector<at::Tensor> params;
  for (const auto& group : optimizer.param_groups()) {
    params.insert(params.end(), group.params().begin(), group.params().end());
  }
  return params;
}

at::ScalarType norm_dtype_of(at::TensorList params) {
  std::vector<at::Tensor> grads;
  for (const at::Tensor& param : params) {
    if (param.grad().defined()) grads.push_back(param.grad());
  }
  return norm_dtype(grads);
}

void check_process_group(const c10::intrusive_ptr<c10::intrusive_ptr_target>& process_group) {
  TORCH_CHECK_TYPE(!process_group || dynamic_cast<c10d::ProcessGroup*>(process_group.get()),
                   "process_group: expected a c10d::ProcessGroup");
}

}  // namespace ampfuse::amp
