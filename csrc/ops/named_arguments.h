// Operators with many arguments: their kernels take them by name, and they are called by name. So
// their order stands in the schema alone.
#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <c10/util/flat_hash_map.h>

#include <functional>
#include <optional>
#include <string>
#include <string_view>
#include <tuple>
#include <utility>
#include <vector>

namespace c10 {
struct FunctionSchema;
class OperatorHandle;
}  // namespace c10

namespace ampfuse {

/// The arguments of a call, on top of the dispatcher's stack. They stay there: valid only during
/// the call.
class NamedArguments {
 public:
  NamedArguments(const c10::FunctionSchema& schema, const torch::jit::Stack& stack);

  const c10::FunctionSchema& schema() const { return schema_; }
  /// Null if the schema has no argument of this name.
  const c10::IValue* find(const char* name) const;
  const c10::IValue& operator[](const char* name) const;
  const at::Tensor& tensor(const char* name) const { return (*this)[name].toTensor(); }
  /// None is nullopt, and so is a tensor that is not defined.
  std::optional<at::Tensor> optional_tensor(const char* name) const;

 private:
  const c10::FunctionSchema& schema_;
  const c10::IValue* first_;
};

/// What an operator is called with: names, and their values.
using NamedValues = std::vector<std::pair<std::string_view, c10::IValue>>;

/// The value of a name, or null if there is none.
using FindValue = std::function<const c10::IValue*(const char* name)>;
FindValue values_in(const NamedArguments& arguments);

/// An AutogradContext's saved_data.
using SavedData = ska::flat_hash_map<std::string, c10::IValue>;
void save(NamedValues values, SavedData& data);
FindValue values_in(const SavedData& data);

/// Calls an operator and returns its results. Arguments that are not named have their defaults.
torch::jit::Stack call_by_name(const c10::OperatorHandle& op, NamedValues values);

/// Results of a kernel or of call_by_name: a tensor, or a struct of tensors whose tie() lists them
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
