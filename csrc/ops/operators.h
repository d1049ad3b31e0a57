// The operators that have kernels for backends. The others are made of these.
#pragma once

namespace ampfuse {

/// The source of an operator's kernel for the Autograd key.
enum class AutogradOf {
  kItself,    // autograd/<op>.cpp
  kMutating,  // autograd/mutating.cpp: the operator writes its arguments and has no derivative
};

struct OperatorEntry {
  const char* name;
  AutogradOf autograd;
};

inline constexpr OperatorEntry kOperators[] = {
    {"cross_entropy_", AutogradOf::kItself},
    {"cross_entropy_backward", AutogradOf::kItself},
    {"cross_entropy_forward", AutogradOf::kItself},
    {"cross_entropy_rescale_", AutogradOf::kMutating},
    {"fused_adam", AutogradOf::kMutating},
    {"fused_adam.write_back_grads", AutogradOf::kMutating},
    {"linear_cross_entropy_backward", AutogradOf::kItself},
    {"linear_cross_entropy_forward", AutogradOf::kItself},
    {"multi_tensor_clip", AutogradOf::kMutating},
    {"multi_tensor_norm", AutogradOf::kItself},
    {"multi_tensor_unscale", AutogradOf::kMutating},
    {"multi_tensor_unscale_norm", AutogradOf::kMutating},
    {"update_scale", AutogradOf::kMutating},
};

}  // namespace ampfuse
