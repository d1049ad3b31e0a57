// Registers a backend's kernels of cross-entropy. Arguments are checked and outputs allocated here.
#pragma once

#include <ATen/ops/empty.h>

#include "../tensors/dtype_name.h"
#include "../tensors/float_dtypes.h"
#include "cross_entropy.h"
#include "registration.h"

namespace ampfuse {

namespace cross_entropy_kernels {

template <const CrossEntropyKernels& kKernels>
CrossEntropyOutputs forward(const NamedArguments& named) {
  const CrossEntropyCall call = CrossEntropyCall::from(named);
  const CrossEntropyArguments& arguments = call.arguments;
  const at::Tensor& input = arguments.input;
  check_cross_entropy(kCrossEntropy, arguments);
  check_cross_entropy_scalar(kCrossEntropy, "grad_scale", call.grad_scale, at::kFloat, input);
  check_cross_entropy_scalar(kCrossEntropy, "denominator", call.denominator, at::kDouble, input);
  const int64_t for_backward = named["for_backward"].toInt();
  const auto what = static_cast<ForBackward>(for_backward);
  TORCH_CHECK_VALUE(
      what >= ForBackward::kNothing && what <= ForBackward::kGradient,
      "cross_entropy_forward: for_backward: expected 0 (nothing), 1 (statistics) or 2 "
      "(the gradient), got ",
      for_backward);
  const bool with_grad = what == ForBackward::kGradient;
  TORCH_CHECK_VALUE(!with_grad || !arguments.options.is_per_row(),
                    "cross_entropy_forward: reduction: expected mean or sum for the gradient, got "
                    "none");
  CrossEntropyOutputs outputs = {
      empty_loss_outputs(arguments, what, named["with_metrics"].toBool()),
      with_grad ? at::empty_symint(input.sym_sizes(), input.options())
                : at::empty({0}, input.options())};
  kKernels.forward(arguments, call.grad_scale, call.denominator, outputs);
  return outputs;
}

template <const CrossEntropyKernels& kKernels>
CrossEntropyInPlaceOutputs in_place(const NamedArguments& named) {
  check_cross_entropy_in_place(named.tensor("input"));
  // Inference tensors skip the autograd kernel, so the arguments are converted here too.
  const CrossEntropyRows rows(CrossEntropyCall::from(named));
  const CrossEntropyCall& call = rows.call();
  const CrossEntropyArguments& arguments = call.arguments;
  TORCH_CHECK_VALUE(!arguments.options.is_per_row(),
                    "cross_entropy_: reduction: expected mean or sum, got none");
  const CrossEntropyOutputs outputs = {
      empty_loss_outputs(arguments, ForBackward::kGradient, /*with_metrics=*/false),
      arguments.input};
  kKernels.forward(arguments, call.grad_scale, call.denominator, outputs);
  return {outputs.loss, outputs.baked_scale};
}

template <const CrossEntropyKernels& kKernels>
at::Tensor backward(const NamedArguments& named) {
  const auto arguments = CrossEntropyArguments::from(named);
  const at::Tensor& grad_output = named.tensor("grad_output");
  const at::Tensor& statistics = named.tensor("statistics");
  const at::Tensor& divisor = named.tensor("divisor");
  constexpr const char* kOp = "cross_entropy_backward";
  check_cross_entropy(kOp, arguments);
  check_cross_entropy_backward(kOp, arguments, grad_output, statistics, divisor);
  const at::Tensor& input = arguments.input;
  const at::Tensor grad = at::empty_symint(input.sym_sizes(), input.options());
  kKernels.backward(arguments, grad_output.to(at::kDouble).contiguous(), statistics, divisor, grad);
  return grad;
}

template <const CrossEntropyKernels& kKernels>
void rescale(const at::Tensor& grad, const at::Tensor& baked_scale, const at::Tensor& grad_output) {
  const at::ScalarType dtype = grad.scalar_type();
  TORCH_CHECK_VALUE(
      can_be_overwritten(grad) && has_float_kernels(dtype),
      "cross_entropy_rescale_: grad: expected floating-point rows that share no memory, got ",
      dtype_name(dtype), " of shape ", grad.sym_sizes(), " and strides ", grad.sym_strides());
  check_cross_entropy_scalar("cross_entropy_rescale_", "baked_scale", baked_scale, at::kFloat,
                             grad);
  check_cross_entropy_scalar("cross_entropy_rescale_", "grad_output", grad_output, loss_dtype(grad),
                             grad);
  kKernels.rescale(grad, baked_scale, grad_output);
}

}  // namespace cross_entropy_kernels

template <const CrossEntropyKernels& kKernels>
void register_cross_entropy(torch::Library& library) {
  namespace kernels = cross_entropy_kernels;
  library.impl("cross_entropy_forward", kernel_by_name<kernels::forward<kKernels>>());
  library.impl("cross_entropy_backward", kernel_by_name<kernels::backward<kKernels>>());
  library.impl("cross_entropy_rescale_", kernels::rescale<kKernels>);
  library.impl("cross_entropy_", kernel_by_name<kernels::in_place<kKernels>>());
}

}  // namespace ampfuse
