// Kernels of operators with many arguments read them by name, and callers pass them by name. So
// only two things depend on their order: the schema, and functions as fused_adam(), which pass them
// in order.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/util/flat_hash_map.h>

#include <optional>
#include <string>
#include <tuple>
#include <utility>

#include "named_values.h"

namespace c10 {
struct FunctionSchema;
class OperatorHandle;
}  // namespace c10

namespace ampfuse {

/// The arguments of a call, which stay on the dispatcher's stack. Valid only during the call.
class NamedArguments {
 public:
  NamedArguments(const c10::FunctionSchema& schema, const torch::jit::Stack& stack);

  const c10::FunctionSchema& schema() const { return schema_; }
  /// Returns null if the schema has no argument of this name.
  const c10::IValue* find(const char* name) const;
  const c10::IValue& operator[](const char* name) const;
  /// Throws a TypeError for an undefined tensor.
  const at::Tensor& tensor(const char* name) const;
  /// Returns nullopt for None and for an undefined tensor.
  std::optional<at::Tensor> optional_tensor(const char* name) const;

 private:
  const c10::FunctionSchema& schema_;
  const c10::IValue* first_;
};

FindValue values_in(const NamedArguments& arguments);

/// An AutogradContext's saved_data.
using SavedData = ska::flat_hash_map<std::string, c10::IValue>;
void save(NamedValues values, SavedData& data);
FindValue values_in(const SavedData& data);

/// Calls an operator and returns its results. Arguments without a value get their defaults.
torch::jit::Stack call_by_name(const c10::OperatorHandle& op, NamedValues values);

/// Convert results to and from the stack: a tensor, or a struct of tensors whose tie() lists them
/// in the schema's order.
inline void push_results(torch::jit::Stack& stack, at::Tensor result) {
  stack.emplace_back(std::move(result));
}
template <typename Results>
void push_results(torch::jit::Stack& stack, Results results) {
  std::apply([&](auto&... tensors) { (stack.emplace_back(std::move(tensors)), ...); },
             results.tie());
}
template <typename Results>
Results results_of(torch::jit::Stack stack) {
  Results results;
  size_t next = 0;
  std::apply([&](auto&... tensors) { ((tensors = std::move(stack[next++]).toTensor()), ...); },
             results.tie());
  return results;
}

}  // namespace ampfuse
