#include "operator_call.h"

#include <ATen/PythonTorchFunctionTLS.h>
#include <torch/csrc/Dtype.h>
#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

namespace ampfuse {

namespace {

// Subclasses may override operators.
bool is_tensor(PyObject* object) {
  return THPVariable_CheckExact(object);
}

std::optional<c10::IValue> tensor_list(PyObject* object) {
  if (!PyList_CheckExact(object) && !PyTuple_CheckExact(object)) return std::nullopt;
  c10::List<at::Tensor> tensors;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(object);
  PyObject* const* const items = PySequence_Fast_ITEMS(object);
  tensors.reserve(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (!is_tensor(items[i])) return std::nullopt;
    tensors.push_back(THPVariable_Unpack(items[i]));
  }
  return tensors;
}

std::optional<int64_t> integer(PyObject* object) {
  if (!PyLong_CheckExact(object)) return std::nullopt;
  int overflow = 0;
  const int64_t number = PyLong_AsLongLongAndOverflow(object, &overflow);
  return overflow == 0 ? std::optional(number) : std::nullopt;
}

std::optional<c10::IValue> int_list(PyObject* object) {
  if (!PyList_CheckExact(object) && !PyTuple_CheckExact(object)) return std::nullopt;
  c10::List<int64_t> numbers;
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(object);
  numbers.reserve(count);
  for (Py_ssize_t i = 0; i < count; ++i) {
    const auto number = integer(PySequence_Fast_GET_ITEM(object, i));
    if (!number) return std::nullopt;
    numbers.push_back(*number);
  }
  return numbers;
}

// Returns an argument of this type, or nothing for types that only torch.ops converts.
std::optional<c10::IValue> converted(PyObject* object, const c10::Type& type) {
  switch (type.kind()) {
    case c10::TypeKind::TensorType:
      if (is_tensor(object)) return THPVariable_Unpack(object);
      break;
    case c10::TypeKind::ListType:
      return type.containedType(0)->kind() == c10::TypeKind::IntType ? int_list(object)
                                                                     : tensor_list(object);
    case c10::TypeKind::FloatType:
      if (PyFloat_CheckExact(object)) return PyFloat_AS_DOUBLE(object);
      break;
    case c10::TypeKind::BoolType:
      if (PyBool_Check(object)) return object == Py_True;
      break;
    case c10::TypeKind::IntType:  // the type of a dtype, too
      if (const auto number = integer(object)) return *number;
      if (THPDtype_Check(object)) return reinterpret_cast<THPDtype*>(object)->scalar_type;
      break;
    case c10::TypeKind::StringType:
      if (PyUnicode_CheckExact(object)) {
        Py_ssize_t size = 0;
        const char* const text = PyUnicode_AsUTF8AndSize(object, &size);
        if (text != nullptr) return std::string(text, size);
        PyErr_Clear();  // it has a lone surrogate
      }
      break;
    default:
      break;
  }
  return std::nullopt;
}

py::object wrapped(const c10::IValue& result) {
  return py::reinterpret_steal<py::object>(THPVariable_Wrap(result.toTensor()));
}

}  // namespace

OperatorCall::OperatorCall(py::object overload)
    : overload_(std::move(overload)),
      handle_(c10::Dispatcher::singleton().findSchemaOrThrow(
          py::cast<std::string>(overload_.attr("_schema").attr("name")).c_str(),
          py::cast<std::string>(overload_.attr("_schema").attr("overload_name")).c_str())) {
  for (const c10::Argument& argument : handle_.schema().arguments()) {
    const auto optional = argument.type()->cast<c10::OptionalType>();
    PyObject* const name = PyUnicode_InternFromString(argument.name().c_str());
    parameters_.push_back({py::reinterpret_steal<py::str>(name),
                           optional ? optional->getElementType() : argument.type(),
                           optional != nullptr, argument.default_value()});
  }
}

bool OperatorCall::convert(const py::args& args, const py::kwargs& kwargs,
                           torch::jit::Stack& stack) const {
  const size_t positional = args.size();
  size_t used = positional;
  stack.reserve(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    const Parameter& parameter = parameters_[i];
    PyObject* object = i < positional ? PyTuple_GET_ITEM(args.ptr(), i)
                                      : PyDict_GetItem(kwargs.ptr(), parameter.name.ptr());
    if (object == nullptr) {
      if (!parameter.default_value) return false;
      stack.push_back(*parameter.default_value);
      continue;
    }
    if (i >= positional) ++used;
    if (parameter.is_optional && object == Py_None) {
      stack.emplace_back();
      continue;
    }
    std::optional<c10::IValue> value = converted(object, *parameter.type);
    if (!value) return false;
    stack.push_back(std::move(*value));
  }
  return used == positional + kwargs.size() && positional <= parameters_.size();
}

py::object OperatorCall::operator()(const py::args& args, const py::kwargs& kwargs) const {
  torch::jit::Stack stack;
  if (at::impl::torch_function_mode_enabled() || !convert(args, kwargs, stack)) {
    return overload_(*args, **kwargs);
  }
  {
    py::gil_scoped_release no_gil;
    handle_.callBoxed(&stack);
  }
  if (stack.empty()) return py::none();
  if (stack.size() == 1) return wrapped(stack[0]);
  py::tuple results(stack.size());
  for (size_t i = 0; i < stack.size(); ++i) results[i] = wrapped(stack[i]);
  return results;
}

}  // namespace ampfuse
