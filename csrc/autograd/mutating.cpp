#include "mutating.h"

#include <ATen/core/LegacyTypeDispatch.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/core/GradMode.h>

namespace ampfuse {

namespace {

// Calls visit(tensor, argument name, index in a list or -1) for every tensor the schema says is
// written.
template <typename Visit>
void for_each_written(const c10::FunctionSchema& schema, const torch::jit::Stack& stack,
                      const Visit& visit) {
  const auto& arguments = schema.arguments();
  const size_t first = stack.size() - arguments.size();
  for (size_t a = 0; a < arguments.size(); ++a) {
    const c10::AliasInfo* alias = arguments[a].alias_info();
    if (alias == nullptr || !alias->isWrite()) continue;
    const c10::IValue& value = stack[first + a];
    if (value.isTensor()) {
      if (value.toTensor().defined()) visit(value.toTensor(), arguments[a].name(), -1);
    } else if (value.isTensorList()) {
      int64_t index = 0;
      for (const at::Tensor& tensor : value.toTensorVector()) {
        if (tensor.defined()) visit(tensor, arguments[a].name(), index);
        ++index;
      }
    }
  }
}

void refuse_differentiable(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                           torch::jit::Stack* stack) {
  if (c10::GradMode::is_enabled()) {
    for_each_written(
        op.schema(), *stack, [&](const at::Tensor& tensor, const std::string& name, int64_t index) {
          const std::string place = index < 0 ? name : name + "[" + std::to_string(index) + "]";
          TORCH_CHECK(!tensor.requires_grad(), op.schema().name(), ": ", place,
                      tensor.is_leaf() ? ": a leaf Variable that requires grad is being used in an "
                                         "in-place operation"
                                       : ": expected a tensor that does not require grad, since "
                                         "this in-place operation has no derivative",
                      "; call it under torch.no_grad()");
        });
  }
  const at::AutoDispatchBelowAutograd below;
  op.redispatchBoxed(keys & c10::after_autograd_keyset, stack);
}

void bump_versions(const c10::OperatorHandle& op, c10::DispatchKeySet keys,
                   torch::jit::Stack* stack) {
  // The call takes its arguments off the stack, so they are collected before it; versions move
  // after it, and not at all when it throws.
  std::vector<at::Tensor> written;
  for_each_written(op.schema(), *stack, [&](const at::Tensor& tensor, const std::string&, int64_t) {
    if (!tensor.is_inference()) written.push_back(tensor);
  });
  {
    const at::AutoDispatchBelowADInplaceOrView below;
    op.redispatchBoxed(keys & c10::after_ADInplaceOrView_keyset, stack);
  }
  for (const at::Tensor& tensor : written) tensor.unsafeGetTensorImpl()->bump_version();
}

}  // namespace

torch::CppFunction mutating_autograd() {
  return torch::CppFunction::makeFromBoxedFunction<&refuse_differentiable>();
}

torch::CppFunction mutating_version_bump() {
  return torch::CppFunction::makeFromBoxedFunction<&bump_versions>();
}

}  // namespace ampfuse
