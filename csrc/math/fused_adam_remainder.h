// A float as a bfloat16 and 16 more bits, which together are the float again.
//
// The bfloat16 is the nearest, and of two equally near ones that of larger magnitude; the remainder
// is the difference of the bit patterns, −2¹⁵ … 2¹⁵−1. Rounding ties to even instead would leave
// 2¹⁶+1 differences for 16 bits: a float midway between an odd pattern and an even one rounds to
// the even one from both of its sides.
//
// NaNs are apart, since adding to their pattern could carry into infinity or the sign: the upper
// half is kept, made quiet so that it is a NaN by itself, and the remainder is the lower half.
//
// Programs write bfloat16 parameters without knowing of remainders: masks, pruning, padding rows.
// The remainder that is left over then moves the number by half of the bfloat16's last bit at most.
// Beside zeros and infinities it could make a NaN: it counts as 0 there.
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
  // A negative remainder borrows from the upper half.
  const uint32_t borrow = is_nan ? 0u : (lower & 0x8000u) << 1;
  const uint32_t joined = (upper | lower) - borrow;
  return __builtin_bit_cast(float, is_nan_pattern(joined) && !is_nan ? upper : joined);
}

}  // namespace ampfuse::math
