// The dtypes of tensors that are stored, by torch's and by safetensors' names.
#pragma once

#include <c10/core/ScalarType.h>

#include <string>

namespace ampfuse::checkpoint::detail {

struct DtypeName {
  at::ScalarType dtype;
  const char* torch;
  const char* safetensors;
};

/// Throws Error for a dtype that cannot be stored.
const DtypeName& names_of(at::ScalarType dtype);

/// Throws Error for a name that is unknown.
at::ScalarType dtype_of(const std::string& torch_name);

}  // namespace ampfuse::checkpoint::detail
