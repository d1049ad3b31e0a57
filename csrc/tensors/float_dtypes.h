#pragma once

#include <c10/core/ScalarType.h>

namespace ampfuse {

/// True for half and bfloat16.
constexpr bool is_16bit(c10::ScalarType dtype) {
  return dtype == c10::ScalarType::Half || dtype == c10::ScalarType::BFloat16;
}

}  // namespace ampfuse
