#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>

namespace ampfuse {

/// A dense tensor as kernels see it.
struct TensorRun {
  void* data;
  int64_t size;  // number of elements of `dtype`
  c10::ScalarType dtype;
};

}  // namespace ampfuse
