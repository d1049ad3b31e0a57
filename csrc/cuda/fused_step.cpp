#include "../ops/fused_adam.h"
#include "../ops/fused_sgd.h"
#include "../ops/fused_step_kernels.h"
#include "../ops/fused_step_tensors.h"
#include "fused_step_interface.h"
#include "torch_caller.h"

namespace ampfuse {

namespace {

// Returns a scalar as kernels read it: a pointer to device memory, or a CPU tensor's value.
StepScalar scalar_of(const at::Tensor& tensor) {
  const bool is_double = tensor.scalar_type() == at::kDouble;
  if (tensor.is_cpu()) return {nullptr, is_double, tensor.item<double>()};
  return {tensor.const_data_ptr(), is_double, 0};
}

StepSignals signals_of(const FusedStepArguments& arguments) {
  const auto floats = [](const std::optional<at::Tensor>& tensor) {
    return tensor ? tensor->const_data_ptr<float>() : nullptr;
  };
  return {floats(arguments.found_inf),
          floats(arguments.grad_scale),
          arguments.total_norm ? scalar_of(*arguments.total_norm) : StepScalar{},
          arguments.total_norm.has_value(),
          arguments.max_norm,
          arguments.grad_norm ? arguments.grad_norm->mutable_data_ptr<float>() : nullptr,
          scalar_of(arguments.lr)};
}

template <typename Rule>
void step(const FusedRuleArguments<Rule>& arguments) {
  if (arguments.count() == 0) return;
  const StepTensors tensors(arguments);
  TorchCaller caller(arguments.tensor(math::kParam, 0));
  launch_fused_step(caller, StepCall<Rule>{tensors.get(), arguments.rule_options, arguments.moments,
                                           arguments.options, signals_of(arguments)});
  tensors.write_back();
}

}  // namespace

AMPFUSE_KERNELS(CUDA, m) {
  register_fused_step<fused_adam_arguments, step<math::AdamRule>>(m, "fused_adam");
  register_fused_step<fused_sgd_arguments, step<math::SgdRule>>(m, "fused_sgd");
}

}  // namespace ampfuse
