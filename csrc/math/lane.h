// The few operations whose spelling differs between one number and a vector register of them.
// Formulae under math/ are templates over `V`: a float or a double on the GPU and in scalar tails,
// at::vec::Vectorized<T> in the CPU kernels (cpu/vec/lane.h has that specialisation).
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

  // a·b + c, rounded once (where a CPU has no such instruction, twice).
  static AMPFUSE_HOST_DEVICE V multiply_add(V a, V b, V c) { return std::fma(a, b, c); }

  // a·b, rounded also where it is then added to something.
  static AMPFUSE_HOST_DEVICE V product(V a, V b) {
#if defined(__CUDA_ARCH__)
    if constexpr (sizeof(V) == 4) return __fmul_rn(a, b);
    if constexpr (sizeof(V) == 8) return __dmul_rn(a, b);
#else
    return a * b;
#endif
  }

  // A NaN on either side wins: fmax would lose it.
  static AMPFUSE_HOST_DEVICE V larger(V a, V b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if constexpr (sizeof(V) == 4) {  // in one instruction
      float larger;
      asm("max.NaN.f32 %0, %1, %2;" : "=f"(larger) : "f"(a), "f"(b));
      return larger;
    }
#endif
    return (b > a || b != b) ? b : a;
  }

  // The larger one; x where that is a NaN.
  static AMPFUSE_HOST_DEVICE V at_least(V x, V floor) { return x < floor ? floor : x; }

  static AMPFUSE_HOST_DEVICE V exp(V x) { return std::exp(x); }
  static AMPFUSE_HOST_DEVICE V log(V x) { return std::log(x); }
  static AMPFUSE_HOST_DEVICE V log1p(V x) { return std::log1p(x); }
  static AMPFUSE_HOST_DEVICE V tanh(V x) { return std::tanh(x); }

  // `yes` where what is compared is true, `no` elsewhere.
  static AMPFUSE_HOST_DEVICE V choose(bool is, V yes, V no) { return is ? yes : no; }

  // 0 where x is below `floor`, else value.
  static AMPFUSE_HOST_DEVICE V from_floor_on(V x, V floor, V value) {
    return x < floor ? 0 : value;
  }

  // x·2ᵏ for floats, where `rounded` holds k in its low bits, in two's complement. The result has
  // to be normal.
  static AMPFUSE_HOST_DEVICE float times_power(float x, float rounded) {
    const uint32_t power = __builtin_bit_cast(uint32_t, rounded) << 23;
    return __builtin_bit_cast(float, __builtin_bit_cast(uint32_t, x) + power);
  }
};

// x - x is 0 for every finite x and NaN for infinities and NaNs.
template <typename T>
AMPFUSE_HOST_DEVICE bool is_finite(T x) {
  return x - x == T(0);
}

}  // namespace ampfuse::math
