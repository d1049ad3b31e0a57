#include <ampfuse/cross_entropy_loss.h>

#include <utility>

#include "../ops/cross_entropy_options.h"

namespace ampfuse {

CrossEntropyLossImpl::CrossEntropyLossImpl(CrossEntropyOptions options, WeakScaler scaler)
    : options(std::move(options)), scaler(std::move(scaler)) {
  TORCH_CHECK_VALUE(!this->scaler || !this->options.grad_scale(),
                    "CrossEntropyLoss: pass either scaler or grad_scale, not both");
  weight = this->options.weight().value_or(at::Tensor());
  this->options.weight(std::nullopt);
  CrossEntropyLossImpl::reset();
}

void CrossEntropyLossImpl::reset() {
  // This is a copy; otherwise clones of the module would share the weight.
  weight = register_buffer("weight", weight.defined() ? weight.detach().clone() : weight);
}

void CrossEntropyLossImpl::pretty_print(std::ostream& stream) const {
  stream << "ampfuse::CrossEntropyLoss(";
  print_loss_options(stream, options);
  stream << ")";
}

at::Tensor CrossEntropyLossImpl::forward(const at::Tensor& input, const at::Tensor& target,
                                         const std::optional<at::Tensor>& denominator) {
  CrossEntropyOptions here = options;
  if (!here.weight() && weight.defined()) here.weight(weight);
  if (auto scale = scaler.scale_tensor("CrossEntropyLoss")) here.grad_scale(std::move(scale));
  if (denominator) here.denominator(denominator);
  return cross_entropy(input, target, here);
}

}  // namespace ampfuse
