// Rounds a float up or down at random, so that the mean of the result is the float.
//
// Rounded to nearest, a bfloat16 weight never changes by updates below half its last bit, 0.2 to
// 0.4 % of the weight. Rounded at random, it takes such an update with a probability in proportion.
//
// Each element of a step has a random number of 16 bits. Its products with odd numbers, modulo 2¹⁶,
// have each value once, too, so that the element's parameter, moments and average can each have a
// number of their own, without a visible relation to the others.
#pragma once

#include <cmath>
#include <cstdint>

#include "coded_moment.h"
#include "host_device.h"
#include "philox.h"

namespace ampfuse::math {

// Elements share a call of philox() in eights: element i has 16 bits of counter i / 8.
inline constexpr int kElementsPerCounter = 8;

// Returns the first index of the tensor that follows one with this first index and size. Tensors
// begin at a counter of their own.
AMPFUSE_HOST_DEVICE int64_t index_after(int64_t first, int64_t size) {
  return first + (size + kElementsPerCounter - 1) / kElementsPerCounter * kElementsPerCounter;
}

AMPFUSE_HOST_DEVICE RandomWords<uint32_t> step_random_words(uint64_t seed, int64_t counter,
                                                            uint32_t step) {
  const auto bits = static_cast<uint64_t>(counter);
  return philox<uint32_t>(
      seed, {{static_cast<uint32_t>(bits), static_cast<uint32_t>(bits >> 32), step, 0}});
}

AMPFUSE_HOST_DEVICE uint32_t random_of_element(const RandomWords<uint32_t>& words, int index) {
  return words.word[index / 2] >> (index % 2 * 16) & 0xffffu;
}

// The random numbers of what belongs to an element.
AMPFUSE_HOST_DEVICE uint32_t random_of_param(uint32_t of_element) {
  return of_element;
}
AMPFUSE_HOST_DEVICE uint16_t moment_factor(int moment) {
  return moment == 0 ? 0x6255 : 0xA3D9;
}
AMPFUSE_HOST_DEVICE uint32_t random_of_moment(uint32_t of_element, int moment) {
  return static_cast<uint16_t>(of_element * moment_factor(moment)) >> (16 - kCodeBits);
}
AMPFUSE_HOST_DEVICE uint32_t random_of_ema(uint32_t of_element) {
  return of_element * 0x9E37u & 0xffffu;
}

// Returns x rounded at random to a number that bfloat16 has. The largest numbers are returned as
// they are, for a conversion to nearest, so that none becomes infinite at random.
AMPFUSE_HOST_DEVICE float rounded_to_bfloat16(float x, uint32_t bits16) {
  const auto bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t rounded = (bits + bits16) & 0xffff0000u;
  return __builtin_bit_cast(float, (bits & 0x7fffffffu) >= 0x7f7f0000u ? bits : rounded);
}

// The same for float16.
AMPFUSE_HOST_DEVICE float rounded_to_half(float x, uint32_t bits16) {
  const auto bits = __builtin_bit_cast(uint32_t, x);
  const float magnitude = std::fabs(x);
  // float16 has 10 of the 23 bits.
  const uint32_t normal = (bits + (bits16 >> 3)) & 0xffffe000u;
  // Below 2⁻¹⁴ its numbers are the multiples of 2⁻²⁴.
  const float units = magnitude < 0x1p-14f ? magnitude * 0x1p24f : 0;
  const auto whole = static_cast<float>(static_cast<int32_t>(units));
  const float up = (units - whole) * 0x1p16f > static_cast<float>(bits16) ? 1 : 0;
  const float subnormal = std::copysign((whole + up) * 0x1p-24f, x);
  if (magnitude < 0x1p-14f) return subnormal;
  return magnitude < 65504 ? __builtin_bit_cast(float, normal) : x;
}

}  // namespace ampfuse::math
