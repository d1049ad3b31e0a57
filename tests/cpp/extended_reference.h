// Steps of Adam and SGD with moments in 8 bits, random rounding and averages, one element after
// another, from the definitions: without the library's headers.
#pragma once

#include <array>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <vector>

namespace reference {

inline uint32_t bits_of_float(float x) {
  uint32_t bits;
  std::memcpy(&bits, &x, sizeof(bits));
  return bits;
}

inline float float_of_bits(uint32_t bits) {
  float x;
  std::memcpy(&x, &bits, sizeof(x));
  return x;
}

// Philox 4×32 as published, with any number of rounds.
inline std::array<uint32_t, 4> philox(std::array<uint32_t, 4> counter, std::array<uint32_t, 2> key,
                                      int rounds) {
  for (int round = 0; round < rounds; ++round) {
    const uint64_t a = uint64_t{0xD2511F53} * counter[0];
    const uint64_t b = uint64_t{0xCD9E8D57} * counter[2];
    counter = {uint32_t(b >> 32) ^ counter[1] ^ key[0], uint32_t(b),
               uint32_t(a >> 32) ^ counter[3] ^ key[1], uint32_t(a)};
    key = {key[0] + 0x9E3779B9u, key[1] + 0xBB67AE85u};
  }
  return counter;
}

// Returns the 16 random bits of an element.
inline uint32_t random_of(uint64_t seed, uint32_t step, int64_t index) {
  const auto counter = static_cast<uint64_t>(index / 8);
  const auto words = philox({uint32_t(counter), uint32_t(counter >> 32), step, 0},
                            {uint32_t(seed), uint32_t(seed >> 32)}, 7);
  return words[index % 8 / 2] >> (index % 2 * 16) & 0xffff;
}

inline uint32_t thirteen_bits(uint32_t random, uint32_t factor) {
  return (random * factor & 0xffff) >> 3;
}

inline float round_to_bfloat16(float x, uint32_t random) {
  if (!(std::fabs(x) < float_of_bits(0x7f7f0000))) return x;
  return float_of_bits((bits_of_float(x) + random) & 0xffff0000);
}

// Moments in 8 bits: the codes of one tensor, and a unit per 32 codes as the bits of a bfloat16.
struct Codes {
  bool is_signed;
  std::vector<int> codes;
  std::vector<uint16_t> units;

  float decoded(int64_t i) const {
    const float root = static_cast<float>(codes[i]) * float_of_bits(uint32_t{units[i / 32]} << 16);
    return root * std::fabs(root);
  }

  // Encodes all moments; `random(i)` has 13 bits.
  template <typename Random>
  void encode(const std::vector<float>& moments, const Random& random) {
    const int most = is_signed ? 127 : 255;
    for (size_t first = 0; first < moments.size(); first += 32) {
      const size_t end = std::min(first + 32, moments.size());
      float largest = 0;
      for (size_t i = first; i < end; ++i) {
        largest = std::max(largest, std::sqrt(std::fabs(moments[i])));
      }
      // The smallest bfloat16 that is at least largest / most, less 4 ulps.
      const float exact = largest * (1.0f / static_cast<float>(most));
      const uint32_t unit = ((bits_of_float(exact) + 0xfffb) >> 16) << 16;
      units[first / 32] = static_cast<uint16_t>(unit >> 16);
      const float factor = unit == 0 ? 0 : 8192 / float_of_bits(unit);
      for (size_t i = first; i < end; ++i) {
        const float scaled = std::copysign(std::sqrt(std::fabs(moments[i])) * factor, moments[i]);
        const auto fixed = static_cast<int64_t>(std::nearbyint(scaled));
        const double code = std::floor(static_cast<double>(fixed + random(i)) / 8192);
        codes[i] = static_cast<int>(std::fmax(-most, std::fmin(most, code)));
        if (!is_signed && moments[i] > 0 && codes[i] == 0) codes[i] = 1;
      }
    }
  }
};

}  // namespace reference
