// The parts of the Python module ampfuse_cpp.
#pragma once

#include <torch/csrc/utils/pybind.h>

namespace py = pybind11;

void bind_checkpoint(py::module_& m);
