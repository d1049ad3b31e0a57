// A float as a bfloat16 and 16 more bits, which together are the float again.
//
// The bfloat16 is the nearest, and of two equally near ones that of larger magnitude; the remainder
// is the difference of the bit patterns, −2¹⁵ … 2¹⁵−1. Rounding ties to even instead would leave
// 2¹⁶+1 differences for 16 bits: a float midway between an odd pattern and an even one rounds to
// the even one from both of its sides.
//
// NaNs are apart, since adding to their pattern could carry into infinity or the sign: the upper
// half is kept, made quiet so that it is a NaN by itself, and the remainder is the lower half.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace ampfuse::math {

struct SplitFloat {
  uint16_t bfloat16;
  int16_t remainder;
};

AMPFUSE_HOST_DEVICE SplitFloat split_float(float x) {
  const auto bits = __builtin_bit_cast(uint32_t, x);
  const bool is_nan = (bits & 0x7fffffffu) > 0x7f800000u;
  const uint32_t upper = is_nan ? (bits >> 16) | 0x0040u : (bits + 0x8000u) >> 16;
  return {static_cast<uint16_t>(upper), static_cast<int16_t>(static_cast<uint16_t>(bits))};
}

AMPFUSE_HOST_DEVICE float join_float(SplitFloat split) {
  const uint32_t upper = static_cast<uint32_t>(split.bfloat16) << 16;
  const bool is_nan = (upper & 0x7fffffffu) > 0x7f800000u;
  const uint32_t lower = static_cast<uint16_t>(split.remainder);
  // A negative remainder borrows from the upper half.
  const uint32_t borrow = is_nan ? 0u : (lower & 0x8000u) << 1;
  return __builtin_bit_cast(float, (upper | lower) - borrow);
}

}  // namespace ampfuse::math
