#include "fused_sgd.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ampfuse/fused_sgd.h>

#include <cmath>

#include "fused_step_kernels.h"

namespace ampfuse {

namespace {

constexpr StepNames kSgdNames = {"fused_sgd", {"momentum_buffers"}};

}  // namespace

FusedSgdArguments fused_sgd_arguments(const NamedArguments& named) {
  const math::SgdOptions options = {.momentum = named["momentum"].toDouble(),
                                    .dampening = named["dampening"].toDouble(),
                                    .weight_decay = named["weight_decay"].toDouble(),
                                    .nesterov = named["nesterov"].toBool()};
  const auto check = [](const char* name, double value, bool in_range, const char* range) {
    check_step_number(kSgdNames, name, value, in_range, range);
  };
  check("momentum", options.momentum, options.momentum >= 0 && std::isfinite(options.momentum),
        "a finite number, at least 0");
  check("dampening", options.dampening, std::isfinite(options.dampening), "a finite number");
  // No lower bound: a schedule may make the weight decay negative, like the learning rate.
  check("weight_decay", options.weight_decay, !std::isnan(options.weight_decay), "a number");
  const int moments = options.momentum > 0 ? 1 : 0;
  return {fused_step_arguments(named, kSgdNames, moments), options, moments};
}

void fused_sgd(const FusedSgdTensors& tensors, const FusedSgdOptions& options) {
  const auto find = [](const char* overload) {
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow("ampfuse::fused_sgd", overload)
        .typed<void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                    const at::Tensor&, double, double, double, bool, bool,
                    const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                    const std::optional<at::Tensor>&, std::optional<double>,
                    const std::optional<at::Tensor>&, bool)>();
  };
  static const auto read_grads = find("");
  static const auto write_back_grads = find(kWriteBackGrads);
  (options.write_back_grads ? write_back_grads : read_grads)
      .call(tensors.params, tensors.grads, tensors.momentum_buffers, tensors.state_steps,
            tensors.masters, options.lr, options.momentum, options.dampening, options.weight_decay,
            options.nesterov, options.maximize, options.grad_scale, options.found_inf,
            options.total_norm, options.max_norm, options.grad_norm, options.adopt_params);
}

AMPFUSE_OPERATORS(m) {
  define_fused_step(m, "fused_sgd", "Tensor(c!)[] momentum_buffers, ",
                    "float momentum, float dampening, float weight_decay, bool nesterov, "
                    "bool maximize, ");
}

AMPFUSE_KERNELS(CompositeExplicitAutograd, m) {
  register_fused_step<fused_sgd_arguments, refuse_step_backend>(m, "fused_sgd");
}

}  // namespace ampfuse
