#include "fused_adam.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ampfuse/fused_adam.h>

#include <cmath>

#include "fused_step_kernels.h"

namespace ampfuse {

namespace {

constexpr StepNames kAdamNames = {"fused_adam", {"exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs"}};

}  // namespace

FusedAdamArguments fused_adam_arguments(const NamedArguments& named) {
  const math::AdamOptions options = {.beta1 = named["beta1"].toDouble(),
                                     .beta2 = named["beta2"].toDouble(),
                                     .weight_decay = named["weight_decay"].toDouble(),
                                     .eps = named["eps"].toDouble(),
                                     .decoupled = named["decoupled_weight_decay"].toBool()};
  const auto check = [](const char* name, double value, bool in_range, const char* range) {
    check_step_number(kAdamNames, name, value, in_range, range);
  };
  check("beta1", options.beta1, options.beta1 >= 0 && options.beta1 < 1, "0 <= beta1 < 1");
  check("beta2", options.beta2, options.beta2 >= 0 && options.beta2 < 1, "0 <= beta2 < 1");
  // No lower bound: a schedule may make the weight decay negative, like the learning rate.
  check("weight_decay", options.weight_decay, !std::isnan(options.weight_decay), "a number");
  check("eps", options.eps, options.eps >= 0, "at least 0");
  const int moments = named["amsgrad"].toBool() ? 3 : 2;
  return {fused_step_arguments(named, kAdamNames, moments), options, moments};
}

void fused_adam(const FusedAdamTensors& tensors, const FusedAdamOptions& options) {
  const auto find = [](const char* overload) {
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow("ampfuse::fused_adam", overload)
        .typed<void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                    at::TensorList, at::TensorList, const at::Tensor&, double, double, double,
                    double, bool, bool, bool, const std::optional<at::Tensor>&,
                    const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                    std::optional<double>, const std::optional<at::Tensor>&, bool)>();
  };
  static const auto read_grads = find("");
  static const auto write_back_grads = find(kWriteBackGrads);
  (options.write_back_grads ? write_back_grads : read_grads)
      .call(tensors.params, tensors.grads, tensors.exp_avgs, tensors.exp_avg_sqs,
            tensors.max_exp_avg_sqs, tensors.state_steps, tensors.masters, options.lr,
            options.beta1, options.beta2, options.weight_decay, options.eps, options.amsgrad,
            options.maximize, options.decoupled_weight_decay, options.grad_scale, options.found_inf,
            options.total_norm, options.max_norm, options.grad_norm, options.adopt_params);
}

AMPFUSE_OPERATORS(m) {
  define_fused_step(m, "fused_adam",
                    "Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
                    "Tensor(e!)[] max_exp_avg_sqs, ",
                    "float beta1, float beta2, float weight_decay, float eps, bool amsgrad, "
                    "bool maximize, bool decoupled_weight_decay, ");
}

AMPFUSE_KERNELS(CompositeExplicitAutograd, m) {
  register_fused_step<fused_adam_arguments, refuse_step_backend>(m, "fused_adam");
}

}  // namespace ampfuse
