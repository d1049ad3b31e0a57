#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace ampfuse {

/// Returns the name that Python has for a dtype, for error messages: float16 instead of Half.
inline std::string dtype_name(at::ScalarType dtype) {
  return c10::getDtypeNames(dtype).first;
}

}  // namespace ampfuse
