// Random numbers from counters: Philox 4×32 with 7 rounds (Salmon et al., "Parallel random numbers:
// as easy as 1, 2, 3", 2011), the fewest rounds with which it passes all tests of BigCrush.
//
// A number depends on the key and the counter only, so it is the same on every device, in every
// thread and after every restart, and nothing has to be saved besides the counter.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace ampfuse::math {

// A word of 32 bits, and its product with another, which has 64. cpu/vec/ specialises this for
// vector registers.
template <typename word_t>
struct RandomWord {
  static AMPFUSE_HOST_DEVICE uint64_t product(uint32_t x, uint32_t factor) {
    return uint64_t{x} * factor;
  }
  static AMPFUSE_HOST_DEVICE uint32_t low(uint64_t product) {
    return static_cast<uint32_t>(product);
  }
  static AMPFUSE_HOST_DEVICE uint32_t high(uint64_t product) {
    return static_cast<uint32_t>(product >> 32);
  }
};

// Four independent random words, each uniform in [0, 2³²); or four of each counter in a register.
template <typename word_t>
struct RandomWords {
  word_t word[4];
};

template <typename word_t>
AMPFUSE_HOST_DEVICE RandomWords<word_t> philox(uint64_t key, RandomWords<word_t> counter) {
  using Word = RandomWord<word_t>;
  auto& x = counter.word;
  auto key0 = static_cast<uint32_t>(key);
  auto key1 = static_cast<uint32_t>(key >> 32);
  for (int round = 0; round < 7; ++round) {
    const auto product0 = Word::product(x[0], 0xD2511F53);
    const auto product1 = Word::product(x[2], 0xCD9E8D57);
    x[0] = Word::high(product1) ^ x[1] ^ key0;
    x[1] = Word::low(product1);
    x[2] = Word::high(product0) ^ x[3] ^ key1;
    x[3] = Word::low(product0);
    key0 += 0x9E3779B9;  // the golden ratio
    key1 += 0xBB67AE85;  // √3 − 1
  }
  return counter;
}

}  // namespace ampfuse::math
