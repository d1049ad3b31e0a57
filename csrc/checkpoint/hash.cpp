#include "hash.h"

#include "xxh3.h"

namespace ampfuse::checkpoint::detail {

std::string hash_of(std::string_view bytes) {
  const Hash128 hash = xxh3_128(bytes);
  std::string digits;
  for (const uint64_t half : {hash.high, hash.low}) {
    for (int shift = 60; shift >= 0; shift -= 4) digits += "0123456789abcdef"[half >> shift & 15];
  }
  return digits;
}

std::string hash_of(const at::Tensor& tensor) {
  return hash_of(bytes_of(tensor));
}

}  // namespace ampfuse::checkpoint::detail
