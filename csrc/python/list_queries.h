// What an optimizer asks of thousands of tensors before every step, in one pass instead of an
// attribute of each in turn.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <utility>
#include <vector>

namespace ampfuse {

/// The gradients of parameters, None where there is none, and for each parameter a byte that tells
/// its dtype and whether it has a gradient.
pybind11::tuple grads_and_kinds(const pybind11::list& params);

/// The ordinary gradients of parameters, of each device (device, parameters, gradients), and the
/// places of those that are not: sparse ones, subclasses, and, unless they are allowed, half ones.
pybind11::tuple ordinary_grads(const pybind11::list& params, bool allow_half);

/// Tensors that are not kept alive.
class WeakTensors {
 public:
  explicit WeakTensors(const pybind11::list& tensors);

  /// Those that live, and None for the others.
  pybind11::list alive() const;

 private:
  std::vector<c10::weak_intrusive_ptr<c10::TensorImpl, c10::UndefinedTensorImpl>> tensors_;
};

/// How often the tensors have been written, summed, and a number that changes when one of them gets
/// other memory. Raises for tensors made in inference mode, which do not count writes.
std::pair<int64_t, uint64_t> writes(const pybind11::list& tensors);

}  // namespace ampfuse
