// The random numbers of consecutive elements (math/stochastic_rounding.h).
#pragma once

#include <cstring>

#include "../../math/stochastic_rounding.h"

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
#include <immintrin.h>
#endif

namespace ampfuse::CPU_CAPABILITY {

// Words of several counters, each in the lower half of a lane. The upper halves have no meaning.
#if defined(CPU_CAPABILITY_AVX512)
using WordLanes = uint64_t __attribute__((vector_size(64)));
#elif defined(CPU_CAPABILITY_AVX2)
using WordLanes = uint64_t __attribute__((vector_size(32)));
#else
using WordLanes = uint64_t __attribute__((vector_size(16)));
#endif

}  // namespace ampfuse::CPU_CAPABILITY

template <>
struct ampfuse::math::RandomWord<ampfuse::CPU_CAPABILITY::WordLanes> {
  using Lanes = ampfuse::CPU_CAPABILITY::WordLanes;
  static AMPFUSE_HOST_DEVICE Lanes product(Lanes x, uint32_t factor) {
    const Lanes factors = Lanes{} + factor;
#if defined(CPU_CAPABILITY_AVX512)
    return Lanes(_mm512_mul_epu32(__m512i(x), __m512i(factors)));
#elif defined(CPU_CAPABILITY_AVX2)
    return Lanes(_mm256_mul_epu32(__m256i(x), __m256i(factors)));
#else
    return (x & 0xffffffffu) * factors;
#endif
  }
  static AMPFUSE_HOST_DEVICE Lanes low(Lanes product) { return product; }
  static AMPFUSE_HOST_DEVICE Lanes high(Lanes product) { return product >> 32; }
};

namespace ampfuse::CPU_CAPABILITY {

// Stores the first lanes of both, then the second lanes, and so on.
inline void store_in_turn(WordLanes a, WordLanes b, uint16_t* to) {
#if defined(CPU_CAPABILITY_AVX512)
  const WordLanes first = __builtin_shufflevector(a, b, 0, 8, 1, 9, 2, 10, 3, 11);
  const WordLanes second = __builtin_shufflevector(a, b, 4, 12, 5, 13, 6, 14, 7, 15);
#elif defined(CPU_CAPABILITY_AVX2)
  const WordLanes first = __builtin_shufflevector(a, b, 0, 4, 1, 5);
  const WordLanes second = __builtin_shufflevector(a, b, 2, 6, 3, 7);
#else
  const WordLanes first = __builtin_shufflevector(a, b, 0, 2);
  const WordLanes second = __builtin_shufflevector(a, b, 1, 3);
#endif
  std::memcpy(to, &first, sizeof(first));
  std::memcpy(to + sizeof(first) / sizeof(*to), &second, sizeof(second));
}

/// Random numbers of at most `kMost` consecutive elements, 16 bits each.
template <int64_t kMost>
class ElementRandoms {
 public:
  void draw(uint64_t seed, uint32_t step, int64_t first, int64_t count) {
    const int64_t counter = first / math::kElementsPerCounter;
    first_ = first % math::kElementsPerCounter;
    const int64_t end = first_ + count;
    WordLanes counters;
    for (int64_t lane = 0; lane < kLanes; ++lane) counters[lane] = counter + lane;
    for (int64_t i = 0; i < end; i += kLanes * math::kElementsPerCounter) {
      const auto [drawn] = math::philox<WordLanes>(
          seed, {{counters, counters >> 32, WordLanes{} + step, WordLanes{}}});
      const WordLanes low = (drawn[0] & 0xffffffffu) | drawn[1] << 32;
      const WordLanes high = (drawn[2] & 0xffffffffu) | drawn[3] << 32;
      store_in_turn(low, high, numbers_ + i);
      counters += kLanes;
    }
  }

  const uint16_t* get() const { return numbers_ + first_; }

 private:
  static constexpr int64_t kLanes = sizeof(WordLanes) / sizeof(uint64_t);

  alignas(64) uint16_t numbers_[kMost + kLanes * math::kElementsPerCounter];
  int64_t first_ = 0;
};

}  // namespace ampfuse::CPU_CAPABILITY
