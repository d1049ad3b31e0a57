// Queries about thousands of tensors, which an optimizer needs before every step: one pass each,
// instead of one attribute access in Python per tensor.
#pragma once

#include <ATen/core/Tensor.h>
#include <pybind11/pybind11.h>

#include <utility>
#include <vector>

namespace ampfuse {

/// Returns the gradients of the parameters (None if missing), and for each parameter a byte with
/// its dtype and a flag if it has no gradient.
pybind11::tuple grads_and_kinds(const pybind11::list& params);

/// Returns a tuple (device, parameters, gradients) for each device, and the indices of the
/// parameters whose gradients are left out: sparse ones, subclasses, and fp16 ones unless
/// `allow_fp16`.
pybind11::tuple ordinary_grads(const pybind11::list& params, bool allow_fp16);

/// Returns the sum of the tensors' version counters, and a hash of their addresses. Throws for
/// tensors made in inference mode, which have no version counter.
std::pair<int64_t, uint64_t> writes(const pybind11::list& tensors);

}  // namespace ampfuse
