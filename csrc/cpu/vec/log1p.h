// log(1 + x) of a vector of doubles, in less than half the time of at::vec's log1p.
//
// Let 1 + x = 2ᵏ·m with m between √½ and √2, and f = m − 1. With s = f/(2 + f), log m = 2·atanh s
// = f − f²/2 + s·(f²/2 + R), R = Σ Lᵢ·s²ⁱ. The coefficients are those of FreeBSD's log1p, which
// bounds the error of R by 2⁻⁵⁸. The rounding error of 1 + x is added at the end.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <cstdint>

#include "../../math/host_device.h"

namespace ampfuse::CPU_CAPABILITY {

/// Returns log(1 + x) with an error below 2 ulps for finite x from -1/2 on, and NaN if x is not
/// finite.
AMPFUSE_HOST_DEVICE at::vec::Vectorized<double> finite_log1p(const at::vec::Vectorized<double>& x) {
  using V = at::vec::Vectorized<double>;
  using Bits = at::vec::Vectorized<int64_t>;
  constexpr int64_t kOne = 0x3ff0000000000000;       // 1.0
  constexpr int64_t kRootHalf = 0x3fe6a09e667f3bcd;  // √½
  constexpr int64_t kMantissa = 0x000fffffffffffff;
  constexpr int64_t kTwo52 = 0x4330000000000000;  // 2⁵²: the lowest bit counts 1
  const auto add = [](const V& a, const V& b, const V& c) { return at::vec::fmadd(a, b, c); };

  const V u = V(1) + x;
  const V without_one = u - V(1);
  const V lost = (V(1) - (u - without_one)) + (x - without_one);
  const Bits bits = at::vec::cast<int64_t>(u) + Bits(kOne - kRootHalf);
  const Bits power = bits >> Bits(52);  // k + 1023
  const V m = at::vec::cast<double>((bits & Bits(kMantissa)) + Bits(kRootHalf));
  const V k = at::vec::cast<double>(power | Bits(kTwo52)) - V(0x1p52 + 1023);
  const V one_of_m = at::vec::cast<double>((Bits(2046) - power) << Bits(52));  // 2⁻ᵏ

  const V f = m - V(1);
  const V s = f / (V(2) + f);
  const V z = s * s;
  // Two chains, because each addition waits for the previous one in its chain.
  const V w = z * z;
  V odd = add(V(1.479819860511658591e-01), w, V(1.818357216161805012e-01));
  odd = add(odd, w, V(2.857142874366239149e-01));
  odd = add(odd, w, V(6.666666666666735130e-01));
  V even = add(V(1.531383769920937332e-01), w, V(2.222219843214978396e-01));
  even = add(even, w, V(3.999999999940941908e-01));
  const V r = add(even, z, odd);
  const V half_square = V(0.5) * f * f;
  const V low = add(k, V(1.90821492927058770002e-10), lost * one_of_m);
  const V of_m = (add(s, add(r, z, half_square), low) - half_square) + f;
  return add(k, V(6.93147180369123816490e-01), of_m);  // k times the high part of log 2 is exact
}

}  // namespace ampfuse::CPU_CAPABILITY
