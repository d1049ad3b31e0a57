// The C++ classes, for whoever wants to drive them from Python: the tests, which compare them with
// Python's own.
#pragma once

#include <pybind11/pybind11.h>

namespace ampfuse {

/// Optimizers, GradScaler and AutocastGuard, as a module of their own.
void bind_cpp_classes(pybind11::module_ m);

}  // namespace ampfuse
