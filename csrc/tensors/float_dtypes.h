#pragma once

#include <torch/headeronly/core/ScalarType.h>

namespace ampfuse {

/// True for half and bfloat16.
constexpr bool is_16bit(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Half || dtype == c10::ScalarType::BFloat16;
}

/// True for the real floating-point dtypes that kernels read: not for float8.
constexpr bool has_float_kernels(c10::ScalarType dtype) {
  return is_16bit(dtype) || dtype == c10::ScalarType::Float || dtype == c10::ScalarType::Double;
}

}  // namespace ampfuse
