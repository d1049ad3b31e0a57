#include "survey.h"

#include <torch/csrc/Exceptions.h>
#include <torch/csrc/autograd/python_variable.h>

#include <string>

namespace py = pybind11;

namespace ampfuse {

namespace {

constexpr int kNoGrad = 0x80;  // beside the dtype

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

}  // namespace

py::tuple grads_and_kinds(const py::list& params) {
  HANDLE_TH_ERRORS
  py::list grads(params.size());
  std::string kinds(params.size(), '\0');
  for_each_tensor(params, [&](const at::Tensor& param, size_t i) {
    const at::Tensor& grad = param.grad();
    PyObject* const wrapped = THPVariable_Wrap(grad);  // None when undefined
    if (wrapped == nullptr) throw py::error_already_set();
    PyList_SET_ITEM(grads.ptr(), i, wrapped);
    kinds[i] =
        static_cast<char>(static_cast<int>(param.scalar_type()) | (grad.defined() ? 0 : kNoGrad));
  });
  return py::make_tuple(grads, py::bytes(kinds));
  END_HANDLE_TH_ERRORS_PYBIND
}

TensorStamp::TensorStamp(const py::list& tensors) {
  stamped_.reserve(tensors.size());
  for_each_tensor(tensors, [this](const at::Tensor& tensor, size_t) {
    stamped_.push_back({c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>(
                            tensor.getIntrusivePtr()),
                        tensor._version()});
  });
}

bool TensorStamp::matches(const py::list& tensors) const {
  if (tensors.size() != stamped_.size()) return false;
  bool same = true;
  // A weak pointer keeps the address from being given to another tensor.
  for_each_tensor(tensors, [&](const at::Tensor& tensor, size_t i) {
    same = same && stamped_[i].tensor._unsafe_get_target() == tensor.unsafeGetTensorImpl() &&
           stamped_[i].version == static_cast<int64_t>(tensor._version());
  });
  return same;
}

int64_t version_sum(const py::list& tensors) {
  int64_t sum = 0;
  for_each_tensor(tensors, [&sum](const at::Tensor& tensor, size_t) { sum += tensor._version(); });
  return sum;
}

}  // namespace ampfuse
