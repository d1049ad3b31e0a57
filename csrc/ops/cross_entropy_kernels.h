// How a backend registers its kernels: arguments are checked and memory for results is made here.
#pragma once

#include <ATen/ops/empty.h>
#include <torch/library.h>

#include "../math/cross_entropy.h"
#include "cross_entropy.h"

namespace ampfuse {

namespace cross_entropy_kernels {

using OptionalTensor = std::optional<at::Tensor>;

inline void check_forward(const char* op, const CrossEntropyArguments& arguments,
                          const OptionalTensor& grad_scale, const OptionalTensor& denominator) {
  check_cross_entropy(op, arguments);
  check_cross_entropy_scalar(op, "grad_scale", grad_scale, at::kFloat, arguments.input);
  check_cross_entropy_scalar(op, "denominator", denominator, at::kDouble, arguments.input);
}

template <const CrossEntropyKernels& kKernels>
CrossEntropyOutputs forward(const at::Tensor& input, const at::Tensor& target,
                            const OptionalTensor& weight, int64_t reduction, int64_t ignore_index,
                            double label_smoothing, const OptionalTensor& grad_scale,
                            const OptionalTensor& denominator, double z_loss,
                            std::optional<double> softcap, int64_t for_backward,
                            bool with_metrics) {
  CrossEntropyArguments arguments = {input,        target,          weight, reduction,
                                     ignore_index, label_smoothing, z_loss, softcap};
  check_forward("cross_entropy", arguments, grad_scale, denominator);
  const auto what = static_cast<ForBackward>(for_backward);
  TORCH_CHECK_VALUE(what >= ForBackward::kNothing && what <= ForBackward::kGradientWithinRange,
                    "cross_entropy_forward: for_backward: expected 0 (nothing), 1 (statistics), 2 "
                    "(the gradient) or 3 (the gradient within range), got ",
                    for_backward);
  const bool is_limited = what == ForBackward::kGradientWithinRange;
  const bool with_grad = what == ForBackward::kGradient || is_limited;
  constexpr float kLargestHalf = 65504;
  if (is_limited && input.scalar_type() == at::kHalf) arguments.gradient_limit = kLargestHalf;
  TORCH_CHECK_VALUE(!with_grad || reduction != at::Reduction::None,
                    "cross_entropy_forward: reduction: expected mean or sum for the gradient, got "
                    "none");
  const at::Tensor grad = with_grad ? at::empty_symint(input.sym_sizes(), input.options())
                                    : at::empty({0}, input.options());
  const auto outputs = empty_cross_entropy_outputs(arguments, grad, what, with_metrics);
  kKernels.forward(arguments, grad_scale, denominator, outputs);
  return outputs;
}

template <const CrossEntropyKernels& kKernels>
std::tuple<at::Tensor, at::Tensor> in_place(const at::Tensor& input, const at::Tensor& target,
                                            const OptionalTensor& weight, int64_t reduction,
                                            int64_t ignore_index, double label_smoothing,
                                            const OptionalTensor& grad_scale,
                                            const OptionalTensor& denominator, double z_loss,
                                            std::optional<double> softcap) {
  check_cross_entropy_in_place(input);
  // Again for inference tensors, which come here without autograd.
  const CrossEntropyRows rows(
      {input, target, weight, reduction, ignore_index, label_smoothing, z_loss, softcap},
      grad_scale, denominator, /*with_metrics=*/false);
  const CrossEntropyArguments& arguments = rows.call().arguments;
  TORCH_CHECK_VALUE(reduction != at::Reduction::None,
                    "cross_entropy_: reduction: expected mean or sum, got none");
  const auto outputs = empty_cross_entropy_outputs(arguments, input, ForBackward::kGradient,
                                                   /*with_metrics=*/false);
  kKernels.forward(arguments, rows.call().grad_scale, rows.call().denominator, outputs);
  return {std::get<0>(outputs), std::get<2>(outputs)};
}

template <const CrossEntropyKernels& kKernels>
at::Tensor backward(const at::Tensor& grad_output, const at::Tensor& input,
                    const at::Tensor& target, const OptionalTensor& weight,
                    const at::Tensor& statistics, const at::Tensor& divisor, int64_t reduction,
                    int64_t ignore_index, double label_smoothing, double z_loss,
                    std::optional<double> softcap) {
  const CrossEntropyArguments arguments = {input,        target,          weight, reduction,
                                           ignore_index, label_smoothing, z_loss, softcap};
  constexpr const char* kOp = "cross_entropy_backward";
  check_cross_entropy(kOp, arguments);
  check_cross_entropy_backward(kOp, arguments, grad_output, statistics, divisor);
  const at::Tensor grad = at::empty_symint(input.sym_sizes(), input.options());
  kKernels.backward(arguments, grad_output.to(at::kDouble).contiguous(), statistics, divisor, grad);
  return grad;
}

template <const CrossEntropyKernels& kKernels>
void rescale(const at::Tensor& grad, const at::Tensor& baked, const at::Tensor& grad_output) {
  TORCH_CHECK_VALUE(has_memory_of_its_own(grad) && grad.is_floating_point(),
                    "cross_entropy_rescale_: grad: expected rows with memory of their own, got ",
                    grad.scalar_type(), " of shape ", grad.sym_sizes(), " and strides ",
                    grad.sym_strides());
  check_cross_entropy_scalar("cross_entropy_rescale_", "baked", baked, at::kFloat, grad);
  check_cross_entropy_scalar("cross_entropy_rescale_", "grad_output", grad_output, loss_dtype(grad),
                             grad);
  kKernels.rescale(grad, baked, grad_output);
}

}  // namespace cross_entropy_kernels

template <const CrossEntropyKernels& kKernels>
void register_cross_entropy(torch::Library& library) {
  namespace kernels = cross_entropy_kernels;
  library.impl("cross_entropy_forward", kernels::forward<kKernels>);
  library.impl("cross_entropy_backward", kernels::backward<kKernels>);
  library.impl("cross_entropy_rescale_", kernels::rescale<kKernels>);
  library.impl("cross_entropy_", kernels::in_place<kKernels>);
}

}  // namespace ampfuse
