#include "cross_entropy_double_backward.h"

#include <ATen/ops/cross_entropy_loss.h>
#include <torch/csrc/autograd/autograd.h>

namespace ampfuse {

at::Tensor gradient_of_torch(const CrossEntropyArguments& arguments,
                             const at::Tensor& grad_output) {
  const at::Tensor& input = arguments.input;
  at::Tensor target = arguments.target;
  if (!arguments.has_probabilities()) {
    target = target.to(at::kLong);
    if (arguments.has_positions())
      target = target.reshape_symint({input.sym_size(0), input.sym_size(2)});
  }
  at::Tensor loss = at::cross_entropy_loss_symint(
      input.to(loss_dtype(input)), target, arguments.weight, arguments.options.reduction,
      arguments.options.ignore_index, arguments.options.label_smoothing);
  if (loss.dim() > 0) loss = loss.reshape({-1});
  return torch::autograd::grad({loss}, {input}, {grad_output}, /*retain_graph=*/std::nullopt,
                               /*create_graph=*/true)[0];
}

void SecondDerivativeInputs::keep(const CrossEntropyArguments& arguments) {
  data_["input"] = arguments.input;
  data_["version"] = static_cast<int64_t>(arguments.input._version());
  data_["target"] = arguments.target;
  data_["weight"] = arguments.weight;
  save(arguments.options.named(), data_);
}

at::Tensor SecondDerivativeInputs::gradient(const at::Tensor& grad_output) const {
  const at::Tensor input = data_.at("input").toTensor();
  TORCH_CHECK(static_cast<int64_t>(input._version()) == data_.at("version").toInt(),
              "one of the variables needed for gradient computation has been modified by an "
              "inplace operation: the logits of a cross_entropy that is differentiated twice");
  return gradient_of_torch(
      {input, data_.at("target").toTensor(), data_.at("weight").toOptional<at::Tensor>(),
       LossOptions::from(values_in(data_))},
      grad_output);
}

}  // namespace ampfuse
