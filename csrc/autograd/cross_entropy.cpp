// If possible (can_form_gradient_in_forward), forward computes the gradient together with the loss.
// It reads the logits once and writes the gradient: 4 bytes per 16-bit logit. Otherwise backward
// computes the gradient from the logits, which it reads again, and a few numbers per row: 6 bytes.
#include "../ops/cross_entropy.h"

#include <ATen/SavedTensorHooks.h>
#include <ATen/TensorOperators.h>
#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/ops/logsumexp.h>
#include <ATen/ops/tanh.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/VariableTypeUtils.h>
#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/csrc/autograd/custom_function.h>
#include <torch/csrc/autograd/graph_task.h>

#include <utility>
#include <vector>

#include "../ops/cross_entropy_inputs.h"
#include "../ops/registration.h"
#include "cross_entropy_double_backward.h"
#include "cross_entropy_rescale.h"
#include "mutating.h"
#include "once_differentiable.h"

namespace ampfuse {

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::Function;
using torch::autograd::variable_list;
using OptionalTensor = std::optional<at::Tensor>;

at::Tensor without_derivative(const at::Tensor& grad, const at::Tensor& grad_output) {
  return once_differentiable("cross_entropy", "torch.nn.functional.cross_entropy", grad,
                             grad_output);
}

variable_list baked_gradients(AutogradContext* context, const at::Tensor& grad_output) {
  if (!grad_output.defined()) return variable_list(2);
  const variable_list saved = context->get_saved_variables();
  const at::AutoDispatchBelowAutograd below;
  return {without_derivative(rescaled(saved[0], saved[1], grad_output), grad_output), at::Tensor()};
}

// Returns the loss and the metrics. They are all outputs with a derivative, since compiled autograd
// does not support others; callers detach the metrics.
variable_list loss_and_metrics(const CrossEntropyOutputs& outputs) {
  return {outputs.loss, outputs.lse, outputs.entropy, outputs.argmax};
}

struct GradientInForward : Function<GradientInForward> {
  static variable_list forward(AutogradContext* context, const at::Tensor& input,
                               const CrossEntropyCall& call) {
    if (call.is_twice_differentiable)
      SecondDerivativeInputs(context).keep(call.on(input).arguments);
    const at::AutoDispatchBelowADInplaceOrView below;
    const auto outputs = cross_entropy_forward(call.on(input), ForBackward::kGradient);
    context->save_for_backward({outputs.grad, outputs.baked_scale});
    context->set_materialize_grads(false);  // backward allocates no zeros for the metrics
    return loss_and_metrics(outputs);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    SecondDerivativeInputs second_derivative(context);
    if (c10::GradMode::is_enabled() && second_derivative.is_kept() && grad_outputs[0].defined()) {
      return {second_derivative.gradient(grad_outputs[0]), at::Tensor()};
    }
    variable_list grads = baked_gradients(context, grad_outputs[0]);
    if (!torch::autograd::get_current_graph_task_keep_graph()) second_derivative.release();
    return grads;
  }
};

struct GradientInPlace : Function<GradientInPlace> {
  static variable_list forward(AutogradContext* context, const at::Tensor& input,
                               const CrossEntropyCall& call) {
    const at::AutoDispatchBelowAutograd below;
    const auto [loss, baked_scale] = cross_entropy_in_place(call.on(input));
    context->save_for_backward({input.detach(), baked_scale});
    return {loss, baked_scale};
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    return baked_gradients(context, grad_outputs[0]);
  }
};

// Returns the gradient of probabilities: −weight·(1 − label_smoothing)·(z − lse)·row_grads. z is
// the logits after softcap; row_grads is grad_output / divisor.
at::Tensor target_gradient(const CrossEntropyArguments& arguments, const at::Tensor& row_grads) {
  at::Tensor z = arguments.input.to(loss_dtype(arguments.input));
  const LossOptions& options = arguments.options;
  if (options.softcap) z = at::tanh(z / *options.softcap) * *options.softcap;
  const at::Tensor lse = at::logsumexp(z, 1, /*keepdim=*/true);
  at::Tensor grad = (lse - z) * (row_grads * (1 - options.label_smoothing));
  if (arguments.weight) {
    grad = grad * (arguments.has_positions() ? arguments.weight->unsqueeze(1) : *arguments.weight);
  }
  return grad.to(arguments.target.scalar_type());
}

struct GradientInBackward : Function<GradientInBackward> {
  static variable_list forward(AutogradContext* context, const at::Tensor& input,
                               const at::Tensor& target, const CrossEntropyCall& call) {
    const at::AutoDispatchBelowADInplaceOrView below;
    CrossEntropyCall here = call.on(input);
    here.arguments.target = target;
    const auto outputs = cross_entropy_forward(here, ForBackward::kStatistics);
    const CrossEntropyArguments& arguments = here.arguments;
    context->save_for_backward({input, target, arguments.weight.value_or(at::Tensor()),
                                outputs.statistics, outputs.divisor});
    save(arguments.options.named(), context->saved_data);
    context->saved_data["is_twice_differentiable"] = call.is_twice_differentiable;
    context->set_materialize_grads(false);  // backward allocates no zeros for the metrics
    return loss_and_metrics(outputs);
  }

  static variable_list backward(AutogradContext* context, const variable_list& grad_outputs) {
    variable_list grads(3);
    if (!grad_outputs[0].defined()) return grads;
    const auto saved = context->get_saved_variables();
    auto& data = context->saved_data;
    // Saved-tensor hooks may have returned the rows with other strides.
    const auto in_rows = [](const at::Tensor& rows) {
      return has_contiguous_last_dim(rows) ? rows : rows.contiguous();
    };
    const at::Tensor target = saved[1].dim() == 1 ? saved[1].contiguous() : in_rows(saved[1]);
    OptionalTensor weight;
    if (saved[2].defined()) weight = saved[2].contiguous();
    const CrossEntropyArguments arguments = {in_rows(saved[0]), target, weight,
                                             LossOptions::from(values_in(data))};
    if (c10::GradMode::is_enabled() && data["is_twice_differentiable"].toBool()) {
      grads[0] = gradient_of_torch(arguments, grad_outputs[0]);
      return grads;
    }
    const at::Tensor statistics = saved[3].contiguous();
    const at::Tensor& divisor = saved[4];
    const at::AutoDispatchBelowAutograd below;
    if (context->needs_input_grad(0)) {
      grads[0] = without_derivative(
          cross_entropy_backward(grad_outputs[0], arguments, statistics, divisor), grad_outputs[0]);
    }
    if (context->needs_input_grad(1)) {
      at::Tensor row_grads = grad_outputs[0] / divisor;
      if (row_grads.dim() == 1) {
        std::vector<c10::SymInt> shape = arguments.input.sym_sizes().vec();
        shape[1] = 1;
        row_grads = row_grads.view_symint(shape);
      }
      grads[1] = without_derivative(target_gradient(arguments, row_grads), grad_outputs[0]);
    }
    return grads;
  }
};

bool can_form_gradient_in_forward(const CrossEntropyCall& call) {
  const CrossEntropyArguments& arguments = call.arguments;
  return arguments.input.requires_grad() && !arguments.target.requires_grad() &&
         !arguments.options.is_per_row() && !is_traced_or_subclass(arguments.input) &&
         // Saved-tensor hooks, such as those of a checkpoint, would not see what
         // SecondDerivativeInputs keeps.
         !(call.is_twice_differentiable && at::SavedTensorDefaultHooks::get_hooks()) &&
         // fp16 gradients of a mean would be mostly zeros without the loss scale.
         (call.grad_scale || arguments.input.scalar_type() != at::kHalf);
}

variable_list differentiable(const CrossEntropyCall& call) {
  const at::Tensor& input = call.arguments.input;
  const at::Tensor& target = call.arguments.target;
  if (!c10::GradMode::is_enabled() || !(input.requires_grad() || target.requires_grad())) {
    return loss_and_metrics(cross_entropy_forward(call, ForBackward::kNothing));
  }
  return can_form_gradient_in_forward(call) ? GradientInForward::apply(input, call)
                                            : GradientInBackward::apply(input, target, call);
}

at::Tensor cross_entropy_composite(const NamedArguments& named) {
  const CrossEntropyRows rows(CrossEntropyCall::from(named));
  return rows.shaped_loss(differentiable(rows.call())[0]);
}

at::Tensor cross_entropy_as_torch_composite(const NamedArguments& named) {
  CrossEntropyCall call = CrossEntropyCall::from(named);
  TORCH_CHECK_VALUE(
      !(c10::GradMode::is_enabled() && call.arguments.target.requires_grad()),
      "cross_entropy.as_torch: target: gradients with respect to probabilities are not "
      "supported");
  call.is_twice_differentiable = true;
  const CrossEntropyRows rows(std::move(call));
  return rows.shaped_loss(differentiable(rows.call())[0]);
}

LossAndMetrics cross_entropy_metrics_composite(const NamedArguments& named) {
  CrossEntropyCall call = CrossEntropyCall::from(named);
  call.with_metrics = true;
  const CrossEntropyRows rows(std::move(call));
  const variable_list of_rows = differentiable(rows.call());
  const at::Tensor argmax = rows.shaped(of_rows[3]);
  const int64_t class_dim = named.tensor("input").dim() == 1 ? 0 : 1;
  return {
      rows.shaped_loss(of_rows[0]), rows.shaped(of_rows[1].detach()),
      rows.shaped(of_rows[2].detach()), argmax,
      correct_predictions(argmax, named.tensor("target"), rows.options().ignore_index, class_dim)};
}

CrossEntropyInPlaceOutputs cross_entropy_in_place_autograd(const NamedArguments& named) {
  CrossEntropyCall call = CrossEntropyCall::from(named);
  const auto& [input, target] = std::tie(call.arguments.input, call.arguments.target);
  TORCH_CHECK_NOT_IMPLEMENTED(!is_traced_or_subclass(input),
                              "cross_entropy_: input: cannot be overwritten inside torch.compile, "
                              "nor if it is a tensor subclass; use cross_entropy");
  TORCH_CHECK_VALUE(!(c10::GradMode::is_enabled() && target.requires_grad()),
                    "cross_entropy_: target: gradients with respect to probabilities are not "
                    "supported; detach() it or use cross_entropy");
  torch::autograd::check_inplace(input, input.requires_grad());
  check_cross_entropy_in_place(input);
  TORCH_CHECK_VALUE(
      call.grad_scale || input.scalar_type() != at::kHalf ||
          !(c10::GradMode::is_enabled() && input.requires_grad()),
      "cross_entropy_: grad_scale: expected the loss scale for float16 logits, got "
      "none: gradients formed without it are mostly zeros; pass 1 if there is no scale");
  const CrossEntropyRows rows(call);
  const variable_list results = GradientInPlace::apply(input, rows.call());
  return {results[0], results[1].detach()};
}

}  // namespace

AMPFUSE_KERNELS(CompositeImplicitAutograd, m) {
  m.impl("cross_entropy", kernel_by_name<cross_entropy_composite>());
  m.impl("cross_entropy.as_torch", kernel_by_name<cross_entropy_as_torch_composite>());
  m.impl("cross_entropy.metrics", kernel_by_name<cross_entropy_metrics_composite>());
}

AMPFUSE_KERNELS(Autograd, m) {
  m.impl("cross_entropy_", kernel_by_name<cross_entropy_in_place_autograd>());
  m.impl("cross_entropy_forward", torch::autograd::autogradNotImplementedFallback());
  m.impl("cross_entropy_backward", torch::autograd::autogradNotImplementedFallback());
}

AMPFUSE_KERNELS(ADInplaceOrView, m) {
  m.impl("cross_entropy_", mutating_version_bump());
}

}  // namespace ampfuse
