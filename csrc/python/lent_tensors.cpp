#include "lent_tensors.h"

#include <torch/csrc/autograd/python_variable.h>

namespace py = pybind11;

namespace ampfuse {

namespace {

constexpr size_t kCounted = 64;  // up to this many tensors are counted

// Strided tensors on devices that kernels know, without a property that torch resolves before them.
bool is_ordinary(const at::Tensor& tensor) {
  static const c10::DispatchKeySet ordinary(
      {c10::DispatchKey::CPU, c10::DispatchKey::CUDA, c10::DispatchKey::ADInplaceOrView,
       c10::DispatchKey::AutogradCPU, c10::DispatchKey::AutogradCUDA, c10::DispatchKey::AutocastCPU,
       c10::DispatchKey::AutocastCUDA});
  return (tensor.key_set().raw_repr() & ~ordinary.raw_repr()) == 0;
}

bool may_be_lent(const py::tuple& owners) {
  const size_t count = owners.size();
  for (size_t i = 0; i < count; ++i) {
    if (i + 8 < count) __builtin_prefetch(PyTuple_GET_ITEM(owners.ptr(), i + 8));
    PyObject* const owner = PyTuple_GET_ITEM(owners.ptr(), i);
    if (!THPVariable_CheckExact(owner) || !is_ordinary(THPVariable_Unpack(owner))) return false;
  }
  return true;
}

}  // namespace

std::optional<LentTensors> LentTensors::of(py::handle sequence) {
  if (!PyList_CheckExact(sequence.ptr()) && !PyTuple_CheckExact(sequence.ptr())) return {};
  // First: making it may run Python code, which may change the list.
  auto owners = py::reinterpret_steal<py::tuple>(PySequence_Tuple(sequence.ptr()));
  if (!owners) throw py::error_already_set();
  if (!may_be_lent(owners)) return {};
  return LentTensors(std::move(owners));
}

LentTensors::LentTensors(py::tuple owners)
    : owners_(std::move(owners)), counted_(owners_.size() <= kCounted) {
  c10::impl::GenericList list(c10::TensorType::get());
  list.reserve(owners_.size());
  for (const py::handle owner : owners_) {
    const at::Tensor& tensor = THPVariable_Unpack(owner.ptr());
    list.push_back(counted_ ? c10::IValue(tensor)
                            : c10::IValue(c10::MaybeOwnedTraits<at::Tensor>::createBorrow(tensor)));
  }
  list_ = std::move(list);
}

LentTensors::~LentTensors() {
  if (!owners_) return;  // moved from
  const c10::ArrayRef<c10::IValue> items = list_.toListRef();
  for (size_t i = 0; i < items.size() && !counted_; ++i) {
    const at::Tensor& owned = THPVariable_Unpack(PyTuple_GET_ITEM(owners_.ptr(), i));
    // Out of the list, which the dispatcher shows as const.
    at::Tensor lent = std::move(const_cast<c10::IValue&>(items[i])).toTensor();
    if (lent.is_same(owned)) {
      lent.unsafeReleaseTensorImpl();  // without being counted down
    } else {
      // Somebody has put another tensor there, and with the one that was lent dropped a count.
      c10::raw::intrusive_ptr::incref(owned.unsafeGetTensorImpl());
    }
  }
}

}  // namespace ampfuse
