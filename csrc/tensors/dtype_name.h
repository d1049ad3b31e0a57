#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace ampfuse {

/// Returns the name that Python has for a dtype, for error messages: float16 instead of Half.
inline std::string dtype_name(at::ScalarType dtype) {
  // getDtypeNames() throws for these two, which a message may have to name.
  if (dtype == at::ScalarType::Undefined || dtype == at::ScalarType::NumOptions) return "undefined";
  return std::string(c10::getDtypeNames(dtype).first);
}

}  // namespace ampfuse
