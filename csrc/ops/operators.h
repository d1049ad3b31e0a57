// The operators that each backend has kernels for. All other operators are composed of these.
#pragma once

namespace ampfuse {

/// The source of an operator's kernel for the Autograd key.
enum class AutogradOf {
  kOwn,       // another file in autograd/, also for ADInplaceOrView if the op writes arguments
  kMutating,  // autograd/mutating.cpp: the operator writes its arguments and has no derivative
};

struct OperatorEntry {
  const char* name;
  AutogradOf autograd;
};

inline constexpr OperatorEntry kOperators[] = {
    {"cross_entropy_", AutogradOf::kOwn},
    {"cross_entropy_backward", AutogradOf::kOwn},
    {"cross_entropy_forward", AutogradOf::kOwn},
    {"cross_entropy_rescale_", AutogradOf::kMutating},
    {"fused_adam", AutogradOf::kMutating},
    {"fused_adam.write_back_grads", AutogradOf::kMutating},
    {"fused_sgd", AutogradOf::kMutating},
    {"fused_sgd.write_back_grads", AutogradOf::kMutating},
    {"linear_cross_entropy_backward", AutogradOf::kOwn},
    {"linear_cross_entropy_forward", AutogradOf::kOwn},
    {"multi_tensor_clip", AutogradOf::kMutating},
    {"multi_tensor_norm", AutogradOf::kOwn},
    {"multi_tensor_unscale", AutogradOf::kMutating},
    {"multi_tensor_unscale_norm", AutogradOf::kMutating},
    {"update_scale", AutogradOf::kMutating},
};

}  // namespace ampfuse
