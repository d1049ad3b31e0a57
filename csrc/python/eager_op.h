#pragma once

#include <ATen/core/dispatch/Dispatcher.h>
#include <pybind11/pybind11.h>

#include <string>

namespace ampfuse {

/// One of our operators, called with tensor lists that it is lent (lent_tensors.h).
class EagerOp {
 public:
  EagerOp(const std::string& name, const std::string& overload);

  /// What the operator returns, or NotImplemented where the call is one for torch.ops, which
  /// serves every kind of caller and explains what is wrong with arguments.
  pybind11::object call(const pybind11::args& args, const pybind11::kwargs& kwargs) const;

 private:
  c10::OperatorHandle op_;
};

}  // namespace ampfuse
