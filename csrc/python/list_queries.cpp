#include "list_queries.h"

#include <torch/csrc/autograd/python_variable.h>
#include <torch/csrc/utils/pybind.h>

#include <string>
#include <vector>

#include "../tensors/device_scalars.h"

namespace py = pybind11;

namespace ampfuse {

namespace {

constexpr int kNoGrad = 0x80;  // the bit of a kind that is set if the gradient is missing

template <typename Visit>
void for_each_tensor(const py::list& list, const Visit& visit) {
  const size_t count = list.size();
  for (size_t i = 0; i < count; ++i) {
    if (i + 4 < count) __builtin_prefetch(PyList_GET_ITEM(list.ptr(), i + 4));
    PyObject* const object = PyList_GET_ITEM(list.ptr(), i);
    if (!THPVariable_Check(object)) throw py::type_error("expected a list of tensors");
    visit(THPVariable_Unpack(object), i);
  }
}

// Returns None for an undefined tensor.
py::object wrapped(const at::Tensor& tensor) {
  PyObject* const object = THPVariable_Wrap(tensor);
  if (object == nullptr) throw py::error_already_set();
  return py::reinterpret_steal<py::object>(object);
}

}  // namespace

py::tuple grads_and_kinds(const py::list& params) {
  py::list grads(params.size());
  std::string kinds(params.size(), '\0');
  for_each_tensor(params, [&](const at::Tensor& param, size_t i) {
    const at::Tensor& grad = param.grad();
    PyList_SET_ITEM(grads.ptr(), i, wrapped(grad).release().ptr());
    kinds[i] =
        static_cast<char>(static_cast<int>(param.scalar_type()) | (grad.defined() ? 0 : kNoGrad));
  });
  return py::make_tuple(grads, py::bytes(kinds));
}

py::tuple ordinary_grads(const py::list& params, bool allow_fp16) {
  struct OfDevice {
    at::Device device;
    py::list params = py::list();
    py::list grads = py::list();
  };
  std::vector<OfDevice> devices;
  py::list others;
  for_each_tensor(params, [&](const at::Tensor& param, size_t i) {
    const at::Tensor& grad = param.grad();
    if (!grad.defined()) return;
    if (grad.layout() != at::kStrided || grad.is_conj() ||
        grad.key_set().has(c10::DispatchKey::Python) ||
        (grad.scalar_type() == at::kHalf && !allow_fp16)) {
      others.append(i);
      return;
    }
    OfDevice& of_device = entry_for_device(devices, grad.device());
    of_device.params.append(py::handle(PyList_GET_ITEM(params.ptr(), i)));
    of_device.grads.append(wrapped(grad));
  });
  py::list by_device;
  for (const OfDevice& of_device : devices) {
    by_device.append(py::make_tuple(of_device.device, of_device.params, of_device.grads));
  }
  return py::make_tuple(by_device, others);
}

std::pair<int64_t, uint64_t> writes(const py::list& tensors) {
  std::pair<int64_t, uint64_t> writes = {0, 0};
  for_each_tensor(tensors, [&writes](const at::Tensor& tensor, size_t) {
    writes.first += tensor._version();
    writes.second = writes.second * 31 + reinterpret_cast<uintptr_t>(tensor.const_data_ptr());
  });
  return writes;
}

}  // namespace ampfuse
