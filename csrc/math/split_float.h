// Splits a float into a bfloat16 and a remainder of 16 bits, and joins the two without loss.
//
// The bfloat16 is the nearest one, and for ties the one of larger magnitude. The remainder is the
// difference of the bit patterns, −2¹⁵ … 2¹⁵−1. Rounding ties to even would need 2¹⁶+1 differences,
// one too many for 16 bits: a bfloat16 with an even pattern would receive the ties on both sides.
//
// A NaN is split differently, since rounding its pattern up could carry into infinity or the sign:
// the bfloat16 is the upper half, made quiet so that it is a NaN by itself, and the remainder is
// the lower half.
//
// Other code may overwrite bfloat16 parameters without knowing about remainders (masks, pruning,
// padding rows). The old remainder then changes the new number by at most half of the bfloat16's
// last bit. Joined with a zero or an infinity, it could give a NaN; it is then ignored.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace ampfuse::math {

struct SplitFloat {
  uint16_t bfloat16;
  int16_t remainder;
};

AMPFUSE_HOST_DEVICE bool is_nan_pattern(uint32_t bits) {
  return (bits & 0x7fffffffu) > 0x7f800000u;
}

AMPFUSE_HOST_DEVICE SplitFloat split_float(float x) {
  const auto bits = __builtin_bit_cast(uint32_t, x);
  const uint32_t upper = is_nan_pattern(bits) ? (bits >> 16) | 0x0040u : (bits + 0x8000u) >> 16;
  return {static_cast<uint16_t>(upper), static_cast<int16_t>(static_cast<uint16_t>(bits))};
}

AMPFUSE_HOST_DEVICE float join_float(SplitFloat split) {
  const uint32_t upper = static_cast<uint32_t>(split.bfloat16) << 16;
  const bool is_nan = is_nan_pattern(upper);
  const uint32_t lower = static_cast<uint16_t>(split.remainder);
  // A negative remainder subtracts one from the upper half.
  const uint32_t borrow = is_nan ? 0u : (lower & 0x8000u) << 1;
  const uint32_t joined = (upper | lower) - borrow;
  return __builtin_bit_cast(float, is_nan_pattern(joined) && !is_nan ? upper : joined);
}

}  // namespace ampfuse::math
