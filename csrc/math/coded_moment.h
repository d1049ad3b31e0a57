// Moments in 8 bits: a code per element, and a unit, in bfloat16, per group of 32 elements.
//
// A code c stands for ±(c·unit)²: a moment is coded by its square root. The second moment enters
// a step by its square root, and the square makes small moments of a group finer than large ones:
// those of Adam's first moment may be 127² times smaller than the largest of their group, those of
// the second 255² times. A second moment that is not 0 gets at least code 1. As 0 it would make the
// element's step as large as 1/eps.
//
// Codes are rounded up or down at random. Rounded to nearest, a second moment would grow but hardly
// shrink: with β₂ = 0.999 its root shrinks by 0.05 % a step, an eighth of the distance between the
// largest codes. The unit is rounded up, so that the largest moment of the group has a code.
//
// A code that is decoded and encoded with the same unit stays the same, whatever the random number:
// c·unit has 16 bits, so it is exact in fp32, and the square root of its rounded square is c·unit.
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"
#include "lane.h"

namespace ampfuse::math {

inline constexpr int kCodeGroup = 32;

// The largest magnitude of a code: int8_t for first moments, which have a sign, else uint8_t.
template <typename code_t>
inline constexpr float kMostCode = code_t(-1) < code_t(0) ? 127 : 255;

AMPFUSE_HOST_DEVICE float decode_moment(float code, float unit) {
  const float root = code * unit;
  return Lane<float>::product(root, std::fabs(root));
}

// Returns the magnitude's bits. Their order is that of magnitudes, with NaN above infinity.
AMPFUSE_HOST_DEVICE uint32_t magnitude_bits(float x) {
  return __builtin_bit_cast(uint32_t, x) & 0x7fffffffu;
}

// Returns the root of a moment's magnitude, with the moment's sign.
AMPFUSE_HOST_DEVICE float signed_root(float moment) {
  return std::copysign(std::sqrt(std::fabs(moment)), moment);
}

// Returns the unit of a group, given the bits of its largest root; NaN if that is infinite or NaN.
// A root that is the largest code times a unit is a few ulps off when it is divided by that code,
// so the unit is rounded up from 4 ulps below.
template <typename code_t>
AMPFUSE_HOST_DEVICE float code_unit(uint32_t largest_root) {
  const float exact = __builtin_bit_cast(float, largest_root) * (1 / kMostCode<code_t>);
  const uint32_t up = (__builtin_bit_cast(uint32_t, exact) + 0xfffbu) & 0xffff0000u;
  return __builtin_bit_cast(float, largest_root >= 0x7f800000u ? 0x7fc00000u : up);
}

// Codes are rounded with this many bits after the point, from as many random bits.
inline constexpr int kCodeBits = 13;

// The largest root in units of 2^-kCodeBits. The largest root of a group may be a few ulps above
// the largest code times its unit: with a random number added, its code would not fit into 8 bits.
template <typename code_t>
inline constexpr float kFixedLimit = kMostCode<code_t> * (1 << kCodeBits);

// Returns the factor by which encode_root() multiplies the roots of a group.
AMPFUSE_HOST_DEVICE float code_factor(float unit) {
  return unit > 0 ? (1 << kCodeBits) / unit : 0;
}

// Returns the code of a moment, given its signed root. `random` has kCodeBits bits; half of their
// range rounds the root to nearest. Where the unit is NaN, codes do not matter.
template <typename code_t>
AMPFUSE_HOST_DEVICE code_t encode_root(float root, float factor, uint32_t random) {
  const float scaled = std::fabs(root) * factor;
  const float limited =
      scaled < kFixedLimit<code_t> ? scaled : kFixedLimit<code_t>;  // for NaN, too
  // Added to 1.5·2²³, a number is rounded to an integer, which is then in the sum's lowest bits.
  const float sum = std::copysign(limited, root) + 0x1.8p23f;
  const auto fixed = __builtin_bit_cast(int32_t, sum) - 0x4B400000;
  const int32_t code = (fixed + static_cast<int32_t>(random)) >> kCodeBits;
  if constexpr (kMostCode<code_t> == 255) {
    const auto least = static_cast<int32_t>(magnitude_bits(root) < 1u ? 0u : 1u);
    return static_cast<code_t>(code > least ? code : least);
  }
  return static_cast<code_t>(code);
}

}  // namespace ampfuse::math
