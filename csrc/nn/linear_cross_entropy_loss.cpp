#include <ampfuse/linear_cross_entropy_loss.h>

#include <utility>

#include "../ops/cross_entropy_options.h"
#include "../tensors/dtype_name.h"

namespace ampfuse {

LinearCrossEntropyLossImpl::LinearCrossEntropyLossImpl(const torch::nn::LinearOptions& linear,
                                                       LinearCrossEntropyOptions options,
                                                       GradScaler* scaler)
    : linear_options(linear), options(std::move(options)), scaler(scaler) {
  TORCH_CHECK_VALUE(!scaler || !this->options.grad_scale(),
                    "LinearCrossEntropyLoss: pass either scaler or grad_scale, not both");
  weight = this->options.class_weight().value_or(at::Tensor());
  this->options.class_weight(std::nullopt);
  LinearCrossEntropyLossImpl::reset();
}

void LinearCrossEntropyLossImpl::reset() {
  linear = register_module("linear", torch::nn::Linear(linear_options));
  // This is a copy; otherwise clones of the module would share the weight.
  weight = register_buffer("weight", weight.defined() ? weight.detach().clone() : weight);
}

void LinearCrossEntropyLossImpl::pretty_print(std::ostream& stream) const {
  stream << "ampfuse::LinearCrossEntropyLoss(in_features=" << linear_options.in_features()
         << ", out_features=" << linear_options.out_features()
         << ", bias=" << (linear_options.bias() ? "true" : "false") << ", ";
  print_loss_options(stream, options);
  if (options.chunk_rows()) stream << ", chunk_rows=" << *options.chunk_rows();
  if (options.chunk_classes()) stream << ", chunk_classes=" << *options.chunk_classes();
  if (options.logits_dtype()) stream << ", logits_dtype=" << dtype_name(*options.logits_dtype());
  stream << ")";
}

at::Tensor LinearCrossEntropyLossImpl::forward(const at::Tensor& hidden, const at::Tensor& target,
                                               const std::optional<at::Tensor>& denominator) {
  LinearCrossEntropyOptions here = options;
  if (weight.defined()) here.class_weight(weight);
  if (scaler != nullptr && scaler->is_enabled()) here.grad_scale(scaler->scale_tensor());
  if (denominator) here.denominator(denominator);
  std::optional<at::Tensor> bias;
  if (linear->bias.defined()) bias = linear->bias;
  return linear_cross_entropy(hidden, linear->weight, target, bias, here);
}

}  // namespace ampfuse
