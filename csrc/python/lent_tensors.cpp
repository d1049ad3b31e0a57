#include "lent_tensors.h"

#include <torch/csrc/autograd/python_variable.h>

namespace py = pybind11;

namespace ampfuse {

namespace {

py::tuple as_tuple(py::handle sequence) {
  return py::reinterpret_steal<py::tuple>(PySequence_Tuple(sequence.ptr()));
}

}  // namespace

bool may_be_lent(py::handle sequence) {
  if (!PyList_CheckExact(sequence.ptr()) && !PyTuple_CheckExact(sequence.ptr())) return false;
  PyObject** const items = PySequence_Fast_ITEMS(sequence.ptr());
  const Py_ssize_t count = PySequence_Fast_GET_SIZE(sequence.ptr());
  for (Py_ssize_t i = 0; i < count; ++i) {
    if (i + 8 < count) __builtin_prefetch(items[i + 8]);
    if (!THPVariable_CheckExact(items[i])) return false;
  }
  return true;
}

LentTensors::LentTensors(py::handle sequence) : owners_(as_tuple(sequence)) {
  c10::impl::GenericList list(c10::TensorType::get());
  list.reserve(owners_.size());
  for (const py::handle owner : owners_) {
    const at::Tensor& tensor = THPVariable_Unpack(owner.ptr());
    list.push_back(c10::IValue(c10::MaybeOwnedTraits<at::Tensor>::createBorrow(tensor)));
  }
  list_ = std::move(list);
}

LentTensors::~LentTensors() {
  if (!owners_) return;  // moved from
  for (const c10::IValue& lent : list_.toListRef()) {
    // Out of the list, which the dispatcher shows as const, and let go without being counted down.
    std::move(const_cast<c10::IValue&>(lent)).toTensor().unsafeReleaseTensorImpl();
  }
}

}  // namespace ampfuse
