// What an optimizer asks of thousands of tensors before every step, in one pass instead of an
// attribute of each in turn.
#pragma once

#include <pybind11/pybind11.h>

namespace ampfuse {

/// The gradients of parameters, None where there is none, and for each parameter a byte that tells
/// its dtype and whether it has a gradient.
pybind11::tuple grads_and_kinds(const pybind11::list& params);

/// How often tensors have been written, summed; of those made in inference mode nobody knows.
int64_t version_sum(const pybind11::list& tensors);

}  // namespace ampfuse
