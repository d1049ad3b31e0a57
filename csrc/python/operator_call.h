// Calls of operators from eager Python code.
#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/pybind11.h>

#include <string>
#include <vector>

namespace ampfuse {

/// An operator that is called with tensors, lists of tensors and numbers. A call of fused_adam with
/// one parameter takes 41 thousand instructions, where torch.ops takes 108 thousand (the kernel
/// itself 23 thousand). Other calls are passed on to torch.ops: those with arguments of other
/// types, with tensor subclasses, which may override operators, or under a torch function mode. So
/// torch.ops also raises the errors for arguments that do not fit the schema.
class OperatorCall {
 public:
  /// `overload`: the operator, as `torch.ops.ampfuse.fused_adam.default`.
  explicit OperatorCall(pybind11::object overload);

  pybind11::object operator()(const pybind11::args& args, const pybind11::kwargs& kwargs) const;

 private:
  struct Parameter {
    pybind11::str name;
    c10::TypePtr type;
    bool is_optional;
    std::optional<c10::IValue> default_value;
  };

  bool convert(const pybind11::args& args, const pybind11::kwargs& kwargs,
               torch::jit::Stack& stack) const;

  pybind11::object overload_;
  c10::OperatorHandle handle_;
  std::vector<Parameter> parameters_;
};

}  // namespace ampfuse
