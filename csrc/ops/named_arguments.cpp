#include "named_arguments.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <c10/util/StringUtil.h>

#include <algorithm>

namespace ampfuse {

NamedArguments::NamedArguments(const c10::FunctionSchema& schema, const torch::jit::Stack& stack)
    : schema_(schema), first_(stack.data() + stack.size() - schema.arguments().size()) {}

const c10::IValue* NamedArguments::find(const char* name) const {
  const auto index = schema_.argumentIndexWithName(name);
  return index ? first_ + *index : nullptr;
}

const c10::IValue& NamedArguments::operator[](const char* name) const {
  const c10::IValue* const value = find(name);
  TORCH_INTERNAL_ASSERT(value != nullptr, schema_.name(), " has no argument ", name);
  return *value;
}

const at::Tensor& NamedArguments::tensor(const char* name) const {
  const at::Tensor& tensor = (*this)[name].toTensor();
  // Only C++ programs can pass one. Without this check, torch's errors would not name the argument.
  TORCH_CHECK_TYPE(tensor.defined(), c10::str(schema_.name()).substr(sizeof("ampfuse::") - 1), ": ",
                   name, ": expected a tensor, got none");
  return tensor;
}

std::optional<at::Tensor> NamedArguments::optional_tensor(const char* name) const {
  const auto tensor = (*this)[name].toOptional<at::Tensor>();
  return tensor && tensor->defined() ? tensor : std::nullopt;
}

FindValue values_in(const NamedArguments& arguments) {
  return [&arguments](const char* name) { return arguments.find(name); };
}

FindValue values_in(const SavedData& data) {
  return [&data](const char* name) {
    const auto entry = data.find(name);
    return entry == data.end() ? nullptr : &entry->second;
  };
}

void save(NamedValues values, SavedData& data) {
  for (auto& [name, value] : values) data[std::string(name)] = std::move(value);
}

torch::jit::Stack call_by_name(const c10::OperatorHandle& op, NamedValues values) {
  torch::jit::Stack stack;
  const auto& arguments = op.schema().arguments();
  stack.reserve(arguments.size());
  size_t used = 0;
  for (const c10::Argument& argument : arguments) {
    const auto value = std::find_if(values.begin(), values.end(), [&](const auto& named) {
      return named.first == argument.name();
    });
    used += value != values.end();
    TORCH_INTERNAL_ASSERT(value != values.end() || argument.default_value(), op.schema().name(),
                          " was called without a value for ", argument.name());
    stack.push_back(value != values.end() ? std::move(value->second)
                                          : argument.default_value().value());
  }
  TORCH_INTERNAL_ASSERT(used == values.size(), op.schema().name(),
                        " was called with a name that none of its arguments has");
  op.callBoxed(stack);
  return stack;
}

}  // namespace ampfuse
