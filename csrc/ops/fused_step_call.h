// Calls the operator of a fused optimizer from C++.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>

#include <string>

#include "fused_step_kernels.h"
#include "named_arguments.h"

namespace ampfuse {

/// Calls an operator. `of_rule` has the lists and options that other optimizers do not have.
template <typename Tensors, typename Options>
void call_fused_step(const std::string& op, const Tensors& tensors, const Options& options,
                     NamedValues of_rule) {
  const NamedValues shared = {{"params", tensors.params},
                              {"grads", tensors.grads},
                              {"state_steps", tensors.state_steps},
                              {"masters", tensors.masters},
                              {"units", tensors.units},
                              {"ema_params", tensors.ema_params},
                              {"lr", options.lr},
                              {"maximize", options.maximize},
                              {"grad_scale", options.grad_scale},
                              {"found_inf", options.found_inf},
                              {"total_norm", options.total_norm},
                              {"max_norm", options.max_norm},
                              {"grad_norm", options.grad_norm},
                              {"adopt_params", options.adopt_params},
                              {"ema_decay", options.ema_decay},
                              {"round_at_random", options.round_at_random},
                              {"seed", options.seed},
                              {"first_indices", options.first_indices}};
  of_rule.insert(of_rule.end(), shared.begin(), shared.end());
  call_by_name(c10::Dispatcher::singleton().findSchemaOrThrow(
                   ("ampfuse::" + op).c_str(), options.write_back_grads ? kWriteBackGrads : ""),
               std::move(of_rule));
}

}  // namespace ampfuse
