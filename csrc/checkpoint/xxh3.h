// The hash XXH3 with 128 bits, seed 0 and the default secret, as doc/xxhash_spec.md of xxHash
// describes it.
#pragma once

#include <cstdint>
#include <string_view>

namespace ampfuse::checkpoint::detail {

struct Hash128 {
  uint64_t low;
  uint64_t high;
};

Hash128 xxh3_128(std::string_view bytes);

}  // namespace ampfuse::checkpoint::detail
