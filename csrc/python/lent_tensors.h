// Tensor lists as the dispatcher takes them, without counting references.
//
// torch counts one for each tensor that it copies from a Python list. Where the count goes from one
// to two, and back, it also takes Python's lock, to keep the Python object with the tensor: for
// thousands of small tensors that is half of a call. While it lasts, the caller's objects keep the
// tensors, so the list may hold them without a count of its own. (Unless another thread swaps what
// they hold: torch.utils.swap_tensors sees from the count whether somebody else has a tensor, and
// does not see this. Short lists, which gain nothing, are counted.)
#pragma once

#include <ATen/core/ivalue.h>
#include <pybind11/pybind11.h>

#include <optional>

namespace ampfuse {

/// A list that holds its tensors only as long as this object lives: afterwards it is empty,
/// whoever has kept it. Made and destroyed while holding Python's lock.
class LentTensors {
 public:
  /// Of a list or tuple of ordinary tensors. Nothing for other objects: subclasses may want to see
  /// the call, and for conjugates, functional tensors and the like torch changes the list on its
  /// way to a kernel.
  static std::optional<LentTensors> of(pybind11::handle sequence);

  ~LentTensors();
  LentTensors(LentTensors&&) = default;
  LentTensors& operator=(LentTensors&&) = delete;

  const c10::IValue& list() const { return list_; }

 private:
  explicit LentTensors(pybind11::tuple owners);

  pybind11::tuple owners_;  // another thread may clear the caller's list
  bool counted_;
  c10::IValue list_;
};

}  // namespace ampfuse
