// Where the gradients of a linear cross-entropy are formed: in forward, which has the logits, of
// what backward is expected to get; or, with reduction none, in backward, from logits that are
// computed once more. What comes in float, the engine rounds to what it is added to.
#include "../ops/linear_cross_entropy.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>

#include <utility>
#include <vector>

#include "../ops/registration.h"
#include "cross_entropy_rescale.h"
#include "once_differentiable.h"

namespace ampfuse {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;
using Metrics = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

LinearGradientMask wanted_of(const LinearCrossEntropyArguments& arguments) {
  const auto is_wanted = [](const at::Tensor& tensor) {
    return c10::GradMode::is_enabled() && tensor.requires_grad();
  };
  return {is_wanted(arguments.hidden), is_wanted(arguments.weight),
          arguments.bias && is_wanted(*arguments.bias)};
}

// As forward's inputs are: hidden, weight, bias, the call, what is wanted.
constexpr size_t kInputs = 5;

variable_list loss_and_metrics(const LinearCrossEntropyOutputs& outputs) {
  return {std::get<0>(outputs), std::get<7>(outputs), std::get<8>(outputs), std::get<9>(outputs)};
}

LinearCrossEntropyOutputs call_forward(const LinearCrossEntropyCall& call,
                                       const LinearGradientMask& wanted) {
  return linear_cross_entropy_forward(call.arguments, call.grad_scale, call.denominator, wanted,
                                      call.with_metrics);
}

// With the tensors that autograd passes.
LinearCrossEntropyOutputs forward_of(AutogradContext* context, const at::Tensor& hidden,
                                     const at::Tensor& weight, const OptionalTensor& bias,
                                     LinearCrossEntropyCall call,
                                     const LinearGradientMask& wanted) {
  call.arguments.hidden = hidden;
  call.arguments.weight = weight;
  call.arguments.bias = bias;
  context->saved_data["has_bias"] = bias.has_value();
  context->set_materialize_grads(false);  // of metrics
  // Not saved as the others are: backward writes to it, and may do so again.
  if (call.accumulate_into) context->saved_data["accumulate_into"] = *call.accumulate_into;
  const at::AutoDispatchBelowADInplaceOrView below;
  return call_forward(call, wanted);
}

// What is not there is not counted among what may need a gradient.
LinearGradientMask needed(AutogradContext* context) {
  return {context->needs_input_grad(0), context->needs_input_grad(1),
          context->saved_data["has_bias"].toBool() && context->needs_input_grad(2)};
}

// Adds the weight's gradient to the buffer that is there for it, and keeps the others.
variable_list gradients_for(AutogradContext* context, const at::Tensor& grad_output,
                            const LinearCrossEntropyGradients& gradients) {
  const auto& [of_hidden, of_weight, of_bias] = gradients;
  const auto once = [&](const at::Tensor& grad) {
    return once_differentiable(kLinearCrossEntropy, "torch.nn.functional.cross_entropy", grad,
                               grad_output);
  };
  variable_list grads(kInputs);
  const LinearGradientMask is_needed = needed(context);
  if (is_needed[0]) grads[0] = once(of_hidden);
  if (is_needed[1]) {
    const auto buffer = context->saved_data.find("accumulate_into");
    if (buffer == context->saved_data.end()) {
      grads[1] = once(of_weight);
    } else {
      const at::NoGradGuard no_grad;
      buffer->second.toTensor().add_(of_weight);
    }
  }
  if (is_needed[2]) grads[2] = once(of_bias);
  return grads;
}

struct LinearGradientInForward : Function<LinearGradientInForward> {
  static variable_list forward(AutogradContext* context, const at::Tensor& hidden,
                               const at::Tensor& weight, const OptionalTensor& bias,
                               const LinearCrossEntropyCall& call,
                               const LinearGradientMask& wanted) {
    const auto outputs = forward_of(context, hidden, weight, bias, call, wanted);
    context->save_for_backward(
        {std::get<1>(outputs), std::get<2>(outputs), std::get<3>(outputs), std::get<4>(outputs)});
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
                                arguments.class_weight.value_or(at::Tensor()), std::get<5>(outputs),
                                std::get<6>(outputs)});
    auto& data = context->saved_data;
    data["ignore_index"] = arguments.ignore_index;
    data["label_smoothing"] = arguments.label_smoothing;
    data["z_loss"] = arguments.z_loss;
    data["softcap"] = arguments.softcap;
    data["dtype"] = arguments.dtype;
    data["weight_grad_dtype"] = arguments.weight_grad_dtype;
    data["chunk_rows"] = arguments.chunk_rows;
    if (const VocabShardArguments shard(arguments.shard); shard.group()) {
      data["group"] = std::string(*shard.group());
      data["vocab_shard"] = shard.numbers()->vec();
    }
    return loss_and_metrics(outputs);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    const at::Tensor& grad_output = grad_outputs[0];
    if (!grad_output.defined()) return variable_list(kInputs);
    const variable_list saved = context->get_saved_variables();
    auto& data = context->saved_data;
    const auto optional = [](const at::Tensor& tensor) {
      return tensor.defined() ? OptionalTensor(tensor) : std::nullopt;
    };
    // Hooks may have brought them back with other strides.
    OptionalTensor class_weight = optional(saved[4]);
    if (class_weight) class_weight = class_weight->contiguous();
    std::optional<VocabShard> shard;
    if (const auto group = data.find("group"); group != data.end()) {
      shard = vocab_shard_of(group->second.toStringView(), data["vocab_shard"].toIntVector());
    }
    const LinearCrossEntropyArguments arguments = {
        .hidden = saved[0],
        .weight = saved[1],
        .bias = optional(saved[2]),
        .target = saved[3].contiguous(),
        .class_weight = class_weight,
        .reduction = at::Reduction::None,
        .ignore_index = data["ignore_index"].toInt(),
        .label_smoothing = data["label_smoothing"].toDouble(),
        .z_loss = data["z_loss"].toDouble(),
        .softcap = data["softcap"].toOptional<double>(),
        .dtype = data["dtype"].toScalarType(),
        .weight_grad_dtype = data["weight_grad_dtype"].toScalarType(),
        .chunk_rows = data["chunk_rows"].toOptional<int64_t>(),
        .shard = shard};
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
  if (!any(wanted)) return loss_and_metrics(call_forward(call, wanted));
  const OptionalTensor& bias = arguments.bias;
  return arguments.reduction == at::Reduction::None
             ? LinearGradientInBackward::apply(arguments.hidden, arguments.weight, bias, call,
                                               wanted)
             : LinearGradientInForward::apply(arguments.hidden, arguments.weight, bias, call,
                                              wanted);
}

Metrics of_rows(const LinearCrossEntropyRows& rows) {
  const variable_list all = differentiable(rows.call());
  const at::Tensor loss = rows.shaped_loss(all[0]);
  if (!rows.call().with_metrics) return {loss, all[1], all[2], all[3]};
  return {loss, rows.shaped(all[1].detach()), rows.shaped(all[2].detach()), rows.shaped(all[3])};
}

at::Tensor linear_cross_entropy_composite(
    const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
    const OptionalTensor& bias, const OptionalTensor& class_weight, int64_t reduction,
    int64_t ignore_index, double label_smoothing, const OptionalTensor& grad_scale,
    const OptionalTensor& denominator, double z_loss, std::optional<double> softcap,
    std::optional<int64_t> chunk_rows, const OptionalTensor& accumulate_into,
    std::optional<c10::string_view> group, at::OptionalIntArrayRef vocab_shard) {
  return std::get<0>(of_rows({{hidden, weight, target, bias, class_weight, reduction, ignore_index,
                               label_smoothing, grad_scale, denominator, z_loss, softcap,
                               chunk_rows, accumulate_into, vocab_shard_of(group, vocab_shard)},
                              /*with_metrics=*/false}));
}

Metrics linear_cross_entropy_metrics_composite(
    const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
    const OptionalTensor& bias, const OptionalTensor& class_weight, int64_t reduction,
    int64_t ignore_index, double label_smoothing, const OptionalTensor& grad_scale,
    const OptionalTensor& denominator, double z_loss, std::optional<double> softcap,
    std::optional<int64_t> chunk_rows, const OptionalTensor& accumulate_into,
    std::optional<c10::string_view> group, at::OptionalIntArrayRef vocab_shard) {
  return of_rows({{hidden, weight, target, bias, class_weight, reduction, ignore_index,
                   label_smoothing, grad_scale, denominator, z_loss, softcap, chunk_rows,
                   accumulate_into, vocab_shard_of(group, vocab_shard)},
                  /*with_metrics=*/true});
}

}  // namespace

AMPFUSE_KERNELS(CompositeImplicitAutograd, m) {
  m.impl("linear_cross_entropy", linear_cross_entropy_composite);
  m.impl("linear_cross_entropy.metrics", linear_cross_entropy_metrics_composite);
}

AMPFUSE_KERNELS(Autograd, m) {
  m.impl("linear_cross_entropy_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("linear_cross_entropy_backward", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace ampfuse
