// Forward computes the gradients of a linear cross-entropy, times baked_scale, since it has the
// logits. With reduction none, backward computes the logits again, and the gradients from them. If
// a gradient is float and its tensor is not, the autograd engine rounds the gradient.
#include "../ops/linear_cross_entropy.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>

#include "../ops/cross_entropy_inputs.h"
#include "../ops/registration.h"
#include "cross_entropy_rescale.h"
#include "once_differentiable.h"

namespace ampfuse {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;

LinearGradientMask wanted_of(const LinearCrossEntropyArguments& arguments) {
  const auto is_wanted = [](const at::Tensor& tensor) {
    return c10::GradMode::is_enabled() && tensor.requires_grad();
  };
  return {is_wanted(arguments.hidden), is_wanted(arguments.weight),
          arguments.bias && is_wanted(*arguments.bias)};
}

// Number of inputs of forward: hidden, weight, bias, the call, the mask of wanted gradients.
constexpr size_t kInputs = 5;

variable_list loss_and_metrics(const LinearCrossEntropyOutputs& outputs) {
  return {outputs.loss, outputs.lse, outputs.entropy, outputs.argmax};
}

// Calls forward with the tensors that autograd passes instead of those in the call.
LinearCrossEntropyOutputs forward_of(AutogradContext* context, const at::Tensor& hidden,
                                     const at::Tensor& weight, const OptionalTensor& bias,
                                     LinearCrossEntropyCall call,
                                     const LinearGradientMask& wanted) {
  call.arguments.hidden = hidden;
  call.arguments.weight = weight;
  call.arguments.bias = bias;
  context->saved_data["has_bias"] = bias.has_value();
  context->set_materialize_grads(false);  // backward allocates no zeros for the metrics
  // The buffer is not passed to save_for_backward(), which forbids later writes: backward writes to
  // it, possibly more than once.
  if (call.accumulate_into) context->saved_data["accumulate_into"] = *call.accumulate_into;
  const at::AutoDispatchBelowADInplaceOrView below;
  return linear_cross_entropy_forward(call, wanted);
}

// Autograd does not count an absent bias as an input: needs_input_grad(2) is valid only if there is
// a bias.
LinearGradientMask needed(AutogradContext* context) {
  return {context->needs_input_grad(0), context->needs_input_grad(1),
          context->saved_data["has_bias"].toBool() && context->needs_input_grad(2)};
}

// Returns the gradients of the inputs. The weight's is added to `accumulate_into` if there is one,
// and not returned then.
variable_list gradients_for(AutogradContext* context, const at::Tensor& grad_output,
                            const LinearCrossEntropyGradients& gradients) {
  const auto once = [&](const at::Tensor& grad) {
    return once_differentiable(kLinearCrossEntropy, "torch.nn.functional.cross_entropy", grad,
                               grad_output);
  };
  variable_list grads(kInputs);
  const LinearGradientMask is_needed = needed(context);
  if (is_needed[0]) grads[0] = once(gradients.hidden);
  if (is_needed[1]) {
    const auto buffer = context->saved_data.find("accumulate_into");
    if (buffer == context->saved_data.end()) {
      grads[1] = once(gradients.weight);
    } else {
      const at::NoGradGuard no_grad;
      buffer->second.toTensor().add_(gradients.weight);
    }
  }
  if (is_needed[2]) grads[2] = once(gradients.bias);
  return grads;
}

struct LinearGradientInForward : Function<LinearGradientInForward> {
  static variable_list forward(AutogradContext* context, const at::Tensor& hidden,
                               const at::Tensor& weight, const OptionalTensor& bias,
                               const LinearCrossEntropyCall& call,
                               const LinearGradientMask& wanted) {
    const auto outputs = forward_of(context, hidden, weight, bias, call, wanted);
    const auto& [of_hidden, of_weight, of_bias] = outputs.gradients;
    context->save_for_backward({of_hidden, of_weight, of_bias, outputs.baked_scale});
    return loss_and_metrics(outputs);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    const at::Tensor& grad_output = grad_outputs[0];
    if (!grad_output.defined()) return variable_list(kInputs);
    const variable_list saved = context->get_saved_variables();
    LinearCrossEntropyGradients gradients;
    {
      const at::AutoDispatchBelowAutograd below;
      const LinearGradientMask is_needed = needed(context);
      const auto of = [&](size_t i) {
        return is_needed[i] ? rescaled(saved[i], saved[3], grad_output) : at::Tensor();
      };
      gradients = {of(0), of(1), of(2)};
    }
    return gradients_for(context, grad_output, gradients);
  }
};

struct LinearGradientInBackward : Function<LinearGradientInBackward> {
  static variable_list forward(AutogradContext* context, const at::Tensor& hidden,
                               const at::Tensor& weight, const OptionalTensor& bias,
                               const LinearCrossEntropyCall& call,
                               const LinearGradientMask& wanted) {
    const auto outputs = forward_of(context, hidden, weight, bias, call, wanted);
    const LinearCrossEntropyArguments& arguments = call.arguments;
    context->save_for_backward({hidden, weight, bias.value_or(at::Tensor()), arguments.target,
                                arguments.class_weight.value_or(at::Tensor()), outputs.statistics,
                                outputs.divisor});
    save(arguments.named_options(), context->saved_data);
    return loss_and_metrics(outputs);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    const at::Tensor& grad_output = grad_outputs[0];
    if (!grad_output.defined()) return variable_list(kInputs);
    const variable_list saved = context->get_saved_variables();
    const auto optional = [](const at::Tensor& tensor) {
      return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
    };
    // Saved-tensor hooks may have returned the tensors with other strides.
    OptionalTensor class_weight = optional(saved[4]);
    if (class_weight) class_weight = class_weight->contiguous();
    LinearCrossEntropyArguments arguments = {.hidden = saved[0],
                                             .weight = saved[1],
                                             .bias = optional(saved[2]),
                                             .target = saved[3].contiguous(),
                                             .class_weight = class_weight};
    arguments.set_options(values_in(context->saved_data));
    LinearCrossEntropyGradients gradients;
    {
      const at::AutoDispatchBelowAutograd below;
      gradients = linear_cross_entropy_backward(grad_output, arguments, saved[5].contiguous(),
                                                saved[6], needed(context));
    }
    return gradients_for(context, grad_output, gradients);
  }
};

variable_list differentiable(const LinearCrossEntropyCall& call) {
  const LinearCrossEntropyArguments& arguments = call.arguments;
  const LinearGradientMask wanted = wanted_of(arguments);
  if (!any(wanted)) return loss_and_metrics(linear_cross_entropy_forward(call, wanted));
  const OptionalTensor& bias = arguments.bias;
  return arguments.options.is_per_row()
             ? LinearGradientInBackward::apply(arguments.hidden, arguments.weight, bias, call,
                                               wanted)
             : LinearGradientInForward::apply(arguments.hidden, arguments.weight, bias, call,
                                              wanted);
}

at::Tensor linear_cross_entropy_composite(const NamedArguments& named) {
  const LinearCrossEntropyRows rows(LinearCrossEntropyCall::from(named));
  return rows.shaped_loss(differentiable(rows.call())[0]);
}

LossAndMetrics linear_cross_entropy_metrics_composite(const NamedArguments& named) {
  LinearCrossEntropyCall call = LinearCrossEntropyCall::from(named);
  call.with_metrics = true;
  const LinearCrossEntropyRows rows(std::move(call));
  const variable_list of_rows = differentiable(rows.call());
  const at::Tensor argmax = rows.shaped(of_rows[3]);
  return {rows.shaped_loss(of_rows[0]), rows.shaped(of_rows[1].detach()),
          rows.shaped(of_rows[2].detach()), argmax,
          correct_predictions(argmax, named.tensor("target"), rows.options().ignore_index,
                              /*class_dim=*/-1)};
}

}  // namespace

AMPFUSE_KERNELS(CompositeImplicitAutograd, m) {
  m.impl("linear_cross_entropy", kernel_by_name<linear_cross_entropy_composite>());
  m.impl("linear_cross_entropy.metrics", kernel_by_name<linear_cross_entropy_metrics_composite>());
}

AMPFUSE_KERNELS(Autograd, m) {
  m.impl("linear_cross_entropy_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("linear_cross_entropy_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace ampfuse
