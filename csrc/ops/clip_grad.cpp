#include <ampfuse/clip_grad.h>

#include <ATen/ops/zeros.h>
#include <ampfuse/multi_tensor_clip.h>
#include <ampfuse/multi_tensor_norm.h>
#include <c10/core/GradMode.h>

#include <cmath>
#include <vector>

#include "../tensors/device_scalars.h"
#include "../tensors/tensor_list.h"

namespace ampfuse {

namespace {

void check_defined(const char* argument, at::TensorList tensors) {
  for (size_t i = 0; i < tensors.size(); ++i) {
    TORCH_CHECK_TYPE(tensors[i].defined(), argument, "[", i,
                     "]: expected a tensor, got an undefined one");
  }
}

std::vector<at::Tensor> gradients(at::TensorList parameters) {
  std::vector<at::Tensor> grads;
  grads.reserve(parameters.size());
  for (const at::Tensor& parameter : parameters) {
    if (parameter.grad().defined()) grads.push_back(parameter.grad());
  }
  return grads;
}

at::Tensor total_norm_of(at::TensorList tensors, double norm_type) {
  std::vector<at::Tensor> norms;
  for (const DeviceTensors& list : by_device(tensors)) {
    norms.push_back(multi_tensor_norm(list.tensors, norm_type).total_norm);
  }
  if (norms.empty()) return at::zeros({});
  return joined_norm(std::move(norms), norm_type);
}

}  // namespace

at::Tensor get_total_norm(at::TensorList tensors, double norm_type, bool error_if_nonfinite) {
  const c10::NoGradGuard no_grad;
  check_defined("tensors", tensors);
  const at::Tensor total = total_norm_of(tensors, norm_type);
  TORCH_CHECK(!error_if_nonfinite || std::isfinite(total.item<double>()),
              "The total norm of order ", norm_type,
              " for gradients from `parameters` is non-finite, so it cannot be clipped. To scale "
              "them by this norm nevertheless, set error_if_nonfinite=false");
  return total;
}

void clip_grads_with_norm_(at::TensorList parameters, double max_norm,
                           const at::Tensor& total_norm) {
  const c10::NoGradGuard no_grad;
  TORCH_CHECK_TYPE(total_norm.defined(), "clip_grads_with_norm_: total_norm: expected a tensor");
  check_defined("parameters", parameters);
  for (const at::Tensor& parameter : parameters) resolve_conjugate_grad(parameter);
  const std::vector<DeviceTensors> lists = by_device(gradients(parameters));
  for (const DeviceTensors& list : lists) check_writable_tensors("multi_tensor_clip", list.tensors);
  for (const DeviceTensors& list : lists) {
    // torch's norm of 16-bit gradients is 16-bit, which the op does not accept.
    const auto dtype = total_norm.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
    multi_tensor_clip(list.tensors, total_norm.to(list.device, dtype), max_norm);
  }
}

at::Tensor clip_grad_norm_(at::TensorList parameters, double max_norm, double norm_type,
                           bool error_if_nonfinite) {
  check_defined("parameters", parameters);
  const std::vector<at::Tensor> grads = gradients(parameters);
  const at::Tensor total_norm = get_total_norm(grads, norm_type, error_if_nonfinite);
  clip_grads_with_norm_(parameters, max_norm, total_norm);
  return total_norm;
}

}  // namespace ampfuse
