#include "eager_op.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <c10/core/impl/LocalDispatchKeySet.h>
#include <c10/core/impl/TorchDispatchModeTLS.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/jit/frontend/tracer.h>

#include <deque>

#include "lent_tensors.h"

namespace py = pybind11;

namespace ampfuse {

namespace {

// Modes, like subclasses, want to see the call as Python made it.
bool somebody_is_watching() {
  const c10::DispatchKeySet included = c10::impl::tls_local_dispatch_key_set().included_;
  return at::impl::torch_function_mode_enabled() ||
         c10::impl::TorchDispatchModeTLS::any_modes_set() || torch::jit::tracer::isTracing() ||
         !(included - c10::default_included_set).empty();
}

// The arguments in the order of the schema, lists lent.
class Arguments {
 public:
  // Pushes one; false when it is not plainly of the type.
  bool push(const c10::Type& type, py::handle value) {
    switch (type.kind()) {
      case c10::TypeKind::ListType:
        return push_list(value);
      case c10::TypeKind::TensorType:
        if (!THPVariable_CheckExact(value.ptr())) return false;
        stack.emplace_back(THPVariable_Unpack(value.ptr()));
        return true;
      case c10::TypeKind::FloatType:
        return push_number(value);
      case c10::TypeKind::IntType:
        return push_integer(value);
      case c10::TypeKind::StringType:
        if (!PyUnicode_CheckExact(value.ptr())) return false;
        stack.emplace_back(value.cast<std::string>());
        return true;
      case c10::TypeKind::BoolType:
        if (!PyBool_Check(value.ptr())) return false;
        stack.emplace_back(value.ptr() == Py_True);
        return true;
      case c10::TypeKind::OptionalType:
        if (!value.is_none()) return push(*type.containedType(0), value);
        stack.emplace_back();
        return true;
      default:
        return false;
    }
  }

  torch::jit::Stack stack;

 private:
  bool push_list(py::handle value) {
    std::optional<LentTensors> lent = LentTensors::of(value);
    if (lent) stack.emplace_back(lent_.emplace_back(std::move(*lent)).list());
    return lent.has_value();
  }

  bool push_number(py::handle value) {
    if (!PyFloat_CheckExact(value.ptr()) && !PyLong_CheckExact(value.ptr())) return false;
    const double number = PyFloat_AsDouble(value.ptr());
    if (PyErr_Occurred() != nullptr) {  // an integer beyond all doubles
      PyErr_Clear();
      return false;
    }
    stack.emplace_back(number);
    return true;
  }

  bool push_integer(py::handle value) {
    if (THPDtype_Check(value.ptr())) {  // to a schema a dtype is a number, too
      stack.emplace_back(reinterpret_cast<THPDtype*>(value.ptr())->scalar_type);
      return true;
    }
    if (!PyLong_CheckExact(value.ptr())) return false;
    int overflow = 0;
    const int64_t number = PyLong_AsLongLongAndOverflow(value.ptr(), &overflow);
    if (overflow != 0) return false;
    stack.emplace_back(number);
    return true;
  }

  std::deque<LentTensors> lent_;  // which do not move
};

py::object results(const torch::jit::Stack& stack) {
  const auto wrap = [](const c10::IValue& value) {
    return py::reinterpret_steal<py::object>(THPVariable_Wrap(value.toTensor()));
  };
  if (stack.empty()) return py::none();
  if (stack.size() == 1) return wrap(stack[0]);
  py::tuple all(stack.size());
  for (size_t i = 0; i < stack.size(); ++i) all[i] = wrap(stack[i]);
  return all;
}

}  // namespace

EagerOp::EagerOp(const std::string& name, const std::string& overload)
    : op_(c10::Dispatcher::singleton().findSchemaOrThrow(name.c_str(), overload.c_str())) {}

py::object EagerOp::call(const py::args& args, const py::kwargs& kwargs) const {
  const py::object not_ours = py::reinterpret_borrow<py::object>(Py_NotImplemented);
  const std::vector<c10::Argument>& expected = op_.schema().arguments();
  if (somebody_is_watching() || args.size() + kwargs.size() != expected.size()) return not_ours;
  HANDLE_TH_ERRORS
  Arguments arguments;
  for (size_t i = 0; i < expected.size(); ++i) {
    const py::handle value = i < args.size()
                                 ? py::handle(PyTuple_GET_ITEM(args.ptr(), i))
                                 : PyDict_GetItemString(kwargs.ptr(), expected[i].name().c_str());
    if (!value || !arguments.push(*expected[i].type(), value)) return not_ours;
  }
  {
    const py::gil_scoped_release without_lock;
    op_.callBoxed(&arguments.stack);
  }
  return results(arguments.stack);
  END_HANDLE_TH_ERRORS_PYBIND
}

}  // namespace ampfuse
