#include "fused_sgd.h"

#include <ampfuse/fused_sgd.h>

#include <cmath>

#include "fused_step_call.h"
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
  call_fused_step("fused_sgd", tensors, options,
                  {
                      {"momentum_buffers", tensors.momentum_buffers},
                      {"momentum", options.momentum},
                      {"dampening", options.dampening},
                      {"weight_decay", options.weight_decay},
                      {"nesterov", options.nesterov},
                  });
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
