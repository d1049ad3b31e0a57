#include "mutating.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>
#include <torch/csrc/autograd/forward_grad.h>

#include "../ops/operators.h"
#include "../ops/registration.h"

namespace ampfuse {

namespace {

bool is_written(const c10::Argument& argument) {
  return argument.alias_info() != nullptr && argument.alias_info()->isWrite();
}

// Returns the arguments that the schema marks as written: tensors, or lists of tensors. One
// reference to a list keeps all its tensors alive.
std::vector<c10::IValue> written_arguments(const c10::FunctionSchema& schema,
                                           const torch::jit::Stack& stack) {
  std::vector<c10::IValue> written;
  const auto& arguments = schema.arguments();
  const size_t first = stack.size() - arguments.size();
  for (size_t a = 0; a < arguments.size(); ++a) {
    if (is_written(arguments[a])) written.push_back(stack[first + a]);
  }
  return written;
}

// Calls visit(tensor, index) for every defined tensor in an argument. The index is that in the
// list, or -1 outside a list.
template <typename Visit>
void for_each_tensor(const c10::IValue& value, const Visit& visit) {
  if (value.isTensor()) {
    if (value.toTensor().defined()) visit(value.toTensor(), -1);
  } else if (value.isTensorList()) {
    int64_t index = 0;
    for (const c10::IValue& item : value.toListRef()) {
      if (item.toTensor().defined()) visit(item.toTensor(), index);
      ++index;
    }
  }
}

std::string subscript(int64_t index) {
  return index < 0 ? "" : c10::str("[", index, "]");
}

// Throws for tensors, written or only read, that require grad while grad mode is on, or that have a
// forward-mode tangent: the op would ignore either.
void refuse_differentiable(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                           torch::jit::Stack* stack) {
  const bool grad_mode = c10::GradMode::is_enabled();
  const bool forward_mode = torch::autograd::ForwardADLevel::try_get_by_idx(0) != nullptr;
  const auto& arguments = op.schema().arguments();
  const size_t first = stack->size() - arguments.size();
  for (size_t a = 0; a < arguments.size() && (grad_mode || forward_mode); ++a) {
    for_each_tensor((*stack)[first + a], [&](const at::Tensor& tensor, int64_t index) {
      const bool differentiable = grad_mode && tensor.requires_grad();
      TORCH_CHECK(
          !differentiable, op.schema().name(), ": ", arguments[a].name(), subscript(index),
          is_written(arguments[a]) && tensor.is_leaf()
              ? ": a leaf Variable that requires grad is being used in an in-place operation"
              : ": expected a tensor that does not require grad, since this in-place "
                "operation has no derivative",
          "; call it under torch.no_grad()");
      TORCH_CHECK(
          !tensor._fw_grad(/*level=*/0).defined(), op.schema().name(), ": ", arguments[a].name(),
          subscript(index),
          ": expected a tensor without a forward-mode tangent, since this in-place operation "
          "has no derivative");
    });
  }
  const at::AutoDispatchBelowAutograd below;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

void bump_versions(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
  // Hold the written arguments, since the call takes them off the stack. Their versions are bumped
  // after the call, and not at all if it throws.
  const std::vector<c10::IValue> written = written_arguments(op.schema(), *stack);
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  for (const c10::IValue& argument : written) {
    for_each_tensor(argument, [](const at::Tensor& tensor, int64_t) {
      if (!tensor.is_inference()) tensor.unsafeGetTensorImpl()->bump_version();
    });
  }
}

}  // namespace

torch::CppFunction mutating_version_bump() {
  return torch::CppFunction::makeFromBoxedFunction<&bump_versions>();
}

AMPFUSE_KERNELS(Autograd, m) {
  for (const auto& [name, autograd] : kOperators) {
    if (autograd != AutogradOf::kMutating) continue;
    m.impl(name, torch::CppFunction::makeFromBoxedFunction<&refuse_differentiable>());
  }
}

AMPFUSE_KERNELS(ADInplaceOrView, m) {
  for (const auto& [name, autograd] : kOperators) {
    if (autograd == AutogradOf::kMutating) m.impl(name, mutating_version_bump());
  }
}

}  // namespace ampfuse
