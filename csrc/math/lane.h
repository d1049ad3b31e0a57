// The few operations that are written differently for a single number and for a vector register.
// Formulae under math/ are templates over `V`: float or double on the GPU and for single rows or
// numbers on the CPU, at::vec::Vectorized<T> in cpu/vec/ (specialised in cpu/vec/lane.h).
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"

namespace ampfuse::math {

template <typename V>
struct Lane {
  static AMPFUSE_HOST_DEVICE V abs(V x) { return std::fabs(x); }
  static AMPFUSE_HOST_DEVICE V sqrt(V x) { return std::sqrt(x); }
  static AMPFUSE_HOST_DEVICE V ceil(V x) { return std::ceil(x); }

  // Returns a·b + c, rounded once. A vector register rounds twice if the CPU has no fused
  // multiply-add.
  static AMPFUSE_HOST_DEVICE V multiply_add(V a, V b, V c) { return std::fma(a, b, c); }

  // Returns a·b, rounded. On the GPU the compiler does not fuse it with an addition that follows;
  // in cpu/vec/ the flag -ffp-contract=off prevents that.
  static AMPFUSE_HOST_DEVICE V product(V a, V b) {
#if defined(__CUDA_ARCH__)
    if constexpr (sizeof(V) == 4) return __fmul_rn(a, b);
    if constexpr (sizeof(V) == 8) return __dmul_rn(a, b);
#else
    return a * b;
#endif
  }

  // Returns the larger one, or NaN if either is NaN; fmax would drop the NaN.
  static AMPFUSE_HOST_DEVICE V larger(V a, V b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if constexpr (sizeof(V) == 4) {  // a single instruction
      float larger;
      asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
      return larger;
    }
#endif
    return (b > a || b != b) ? b : a;
  }

  // Returns the larger of x and `floor`, or NaN if x is NaN.
  static AMPFUSE_HOST_DEVICE V at_least(V x, V floor) { return x < floor ? floor : x; }

  static AMPFUSE_HOST_DEVICE V exp(V x) { return std::exp(x); }
  static AMPFUSE_HOST_DEVICE V log(V x) { return std::log(x); }
  static AMPFUSE_HOST_DEVICE V log1p(V x) { return std::log1p(x); }
  static AMPFUSE_HOST_DEVICE V tanh(V x) { return std::tanh(x); }

  // Returns `yes` in the lanes where the condition holds, `no` in the others.
  static AMPFUSE_HOST_DEVICE V choose(bool is, V yes, V no) { return is ? yes : no; }

  // Returns 0 in the lanes where x is below `floor`, `value` in the others.
  static AMPFUSE_HOST_DEVICE V zero_below(V x, V floor, V value) { return x < floor ? 0 : value; }

  // Returns x·2ᵏ for floats. The low bits of `rounded` hold k in two's complement. The result must
  // be a normal number.
  static AMPFUSE_HOST_DEVICE float times_power(float x, float rounded) {
    const uint32_t power = __builtin_bit_cast(uint32_t, rounded) << 23;
    return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, x) + power);
  }
};

// x − x is 0 for every finite x, and NaN for infinities and NaNs.
template <typename T>
AMPFUSE_HOST_DEVICE bool is_finite(T x) {
  return x - x == T(0);
}

}  // namespace ampfuse::math
