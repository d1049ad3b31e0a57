#include "fused_adam.h"

#include <ampfuse/fused_adam.h>

#include <cmath>

#include "fused_step_call.h"
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
  call_fused_step("fused_adam", tensors, options,
                  {
                      {"exp_avgs", tensors.exp_avgs},
                      {"exp_avg_sqs", tensors.exp_avg_sqs},
                      {"max_exp_avg_sqs", tensors.max_exp_avg_sqs},
                      {"beta1", options.beta1},
                      {"beta2", options.beta2},
                      {"weight_decay", options.weight_decay},
                      {"eps", options.eps},
                      {"amsgrad", options.amsgrad},
                      {"decoupled_weight_decay", options.decoupled_weight_decay},
                  });
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
