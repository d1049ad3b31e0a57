// What an optimizer asks of thousands of tensors before every step, in one pass instead of an
// attribute of each in turn.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <vector>

namespace ampfuse {

/// The gradients of parameters, None where there is none, and for each parameter a byte that tells
/// its dtype and whether it has a gradient.
pybind11::tuple grads_and_kinds(const pybind11::list& params);

/// By which tensors are known again, if nobody has written them since. They are not kept alive.
class TensorStamp {
 public:
  explicit TensorStamp(const pybind11::list& tensors);

  /// Whether these are the same, in the same order, and no counter has moved.
  bool matches(const pybind11::list& tensors) const;

 private:
  struct Stamped {
    c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl> tensor;
    int64_t version;
  };
  std::vector<Stamped> stamped_;
};

/// How often tensors have been written, summed; of those made in inference mode nobody knows.
int64_t version_sum(const pybind11::list& tensors);

}  // namespace ampfuse
