// The hash of tensors and files: the 128 bits of XXH3, as hexadecimal digits.
#pragma once

#include <ATen/core/Tensor.h>

#include <string>
#include <string_view>

namespace ampfuse::checkpoint::detail {

inline constexpr size_t kHashDigits = 32;

std::string hash_of(std::string_view bytes);

/// `tensor`: contiguous, on the CPU.
std::string hash_of(const at::Tensor& tensor);

/// Returns the bytes of a contiguous tensor on the CPU.
inline std::string_view bytes_of(const at::Tensor& tensor) {
  return {static_cast<const char*>(tensor.const_data_ptr()), tensor.nbytes()};
}

}  // namespace ampfuse::checkpoint::detail
