// Specialises math::Lane, so that the formulae under math/ work on vector registers.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include "../../math/lane.h"
#include "log1p.h"

namespace ampfuse::math {

template <typename T>
struct Lane<at::vec::Vectorized<T>> {
  using V = at::vec::Vectorized<T>;
  static AMPFUSE_HOST_DEVICE V abs(const V& x) { return x.abs(); }
  static AMPFUSE_HOST_DEVICE V sqrt(const V& x) { return x.sqrt(); }
  static AMPFUSE_HOST_DEVICE V ceil(const V& x) { return x.ceil(); }
  static AMPFUSE_HOST_DEVICE V multiply_add(const V& a, const V& b, const V& c) {
    return at::vec::fmadd(a, b, c);
  }
  static AMPFUSE_HOST_DEVICE V product(const V& a, const V& b) { return a * b; }
  static AMPFUSE_HOST_DEVICE V larger(const V& a, const V& b) { return at::vec::maximum(a, b); }
  static AMPFUSE_HOST_DEVICE V at_least(const V& x, const V& floor) {
    return at::vec::clamp_min(x, floor);
  }
  static AMPFUSE_HOST_DEVICE V exp(const V& x) { return x.exp(); }
  static AMPFUSE_HOST_DEVICE V log(const V& x) { return x.log(); }
  // For doubles from -1/2 on. Returns NaN for numbers that are not finite.
  static AMPFUSE_HOST_DEVICE V log1p(const V& x) { return CPU_CAPABILITY::finite_log1p(x); }
  // Keeps the bits of a NaN: Sleef would set them all, and times_power() would give a number.
  static AMPFUSE_HOST_DEVICE V tanh(const V& x) { return V::blendv(x, x.tanh(), x == x); }
  static AMPFUSE_HOST_DEVICE V choose(const V& is, const V& yes, const V& no) {
    return V::blendv(no, yes, is);
  }
  // The same as choose(a == b, yes, no), but AVX-512 keeps the comparison in a mask register.
  static AMPFUSE_HOST_DEVICE V choose_equal(const V& a, const V& b, const V& yes, const V& no) {
#if defined(CPU_CAPABILITY_AVX512)
    if constexpr (sizeof(T) == 4) {
      return _mm512_mask_blend_ps(_mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ), no, yes);
    } else {
      return _mm512_mask_blend_pd(_mm512_cmp_pd_mask(a, b, _CMP_EQ_OQ), no, yes);
    }
#else
    return V::blendv(no, yes, a == b);
#endif
  }
  static AMPFUSE_HOST_DEVICE V zero_below(const V& x, const V& floor, const V& value) {
#if defined(CPU_CAPABILITY_AVX512)
    return _mm512_maskz_mov_ps(_mm512_cmp_ps_mask(x, floor, _CMP_NLT_UQ), value);
#else
    return value & ((x >= floor) | (x != x));
#endif
  }
  static AMPFUSE_HOST_DEVICE V times_power(const V& x, const V& rounded) {
#if defined(CPU_CAPABILITY_AVX512)
    const __m512i power = _mm512_slli_epi32(_mm512_castps_si512(rounded), 23);
    return _mm512_castsi512_ps(_mm512_add_epi32(_mm512_castps_si512(x), power));
#elif defined(CPU_CAPABILITY_AVX2)
    const __m256i power = _mm256_slli_epi32(_mm256_castps_si256(rounded), 23);
    return _mm256_castsi256_ps(_mm256_add_epi32(_mm256_castps_si256(x), power));
#else
    V result;
    for (int i = 0; i < V::size(); ++i) result[i] = Lane<T>::times_power(x[i], rounded[i]);
    return result;
#endif
  }
};

}  // namespace ampfuse::math
