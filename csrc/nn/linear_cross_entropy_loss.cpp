#include <ampfuse/linear_cross_entropy_loss.h>

#include <utility>

#include "../ops/cross_entropy_options.h"

namespace ampfuse {

LinearCrossEntropyLossImpl::LinearCrossEntropyLossImpl(const torch::nn::LinearOptions& linear,
                                                       LinearCrossEntropyOptions options,
                                                       WeakScaler scaler)
    : linear_options(linear), options(std::move(options)), scaler(std::move(scaler)) {
  TORCH_CHECK_VALUE(!this->scaler || !this->options.grad_scale(),
                    "LinearCrossEntropyLoss: pass either scaler or grad_scale, not both");
  class_weight = this->options.class_weight().value_or(at::Tensor());
  this->options.class_weight(std::nullopt);
  LinearCrossEntropyLossImpl::reset();
}

void LinearCrossEntropyLossImpl::reset() {
  linear = register_module("linear", torch::nn::Linear(linear_options));
  // This is a copy; otherwise clones of the module would share the weight.
  class_weight = register_buffer(
      "weight", class_weight.defined() ? class_weight.detach().clone() : class_weight);
}

void LinearCrossEntropyLossImpl::pretty_print(std::ostream& stream) const {
  stream << "ampfuse::LinearCrossEntropyLoss(in_features=" << linear_options.in_features()
         << ", out_features=" << linear_options.out_features()
         << ", bias=" << (linear_options.bias() ? "true" : "false") << ", ";
  print_loss_options(stream, options);
  stream << ")";
}

at::Tensor LinearCrossEntropyLossImpl::forward(const at::Tensor& hidden, const at::Tensor& target,
                                               const std::optional<at::Tensor>& denominator) {
  LinearCrossEntropyOptions here = options;
  if (!here.class_weight() && class_weight.defined()) here.class_weight(class_weight);
  if (auto scale = scaler.scale_tensor("LinearCrossEntropyLoss")) here.grad_scale(std::move(scale));
  if (denominator) here.denominator(denominator);
  std::optional<at::Tensor> bias;
  if (linear->bias.defined()) bias = linear->bias;
  return linear_cross_entropy(hidden, linear->weight, target, bias, here);
}

}  // namespace ampfuse
