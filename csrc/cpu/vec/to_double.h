// Vector conversions that at::vec lacks.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include <utility>

namespace ampfuse::CPU_CAPABILITY {

/// Returns the lower and the upper half of `x` as doubles.
inline std::pair<at::vec::Vectorized<double>, at::vec::Vectorized<double>> to_double(
    const at::vec::Vectorized<float>& x) {
#if defined(CPU_CAPABILITY_AVX512)
  return {_mm512_cvtps_pd(_mm512_castps512_ps256(x)),
          _mm512_cvtps_pd(_mm512_extractf32x8_ps(x, 1))};
#elif defined(CPU_CAPABILITY_AVX2)
  return {_mm256_cvtps_pd(_mm256_castps256_ps128(x)), _mm256_cvtps_pd(_mm256_extractf128_ps(x, 1))};
#else
  constexpr int kWidth = at::vec::Vectorized<float>::size();
  float narrow[kWidth];
  double wide[kWidth];
  x.store(narrow);
  for (int i = 0; i < kWidth; ++i) wide[i] = narrow[i];
  return {at::vec::Vectorized<double>::loadu(wide),
          at::vec::Vectorized<double>::loadu(wide + kWidth / 2)};
#endif
}

/// Returns one vector of floats from its two halves, rounded.
inline at::vec::Vectorized<float> to_float(const at::vec::Vectorized<double>& low,
                                           const at::vec::Vectorized<double>& high) {
#if defined(CPU_CAPABILITY_AVX512)
  return _mm512_insertf32x8(_mm512_castps256_ps512(_mm512_cvtpd_ps(low)), _mm512_cvtpd_ps(high), 1);
#elif defined(CPU_CAPABILITY_AVX2)
  return _mm256_set_m128(_mm256_cvtpd_ps(high), _mm256_cvtpd_ps(low));
#else
  constexpr int kWidth = at::vec::Vectorized<float>::size();
  float narrow[kWidth];
  double wide[kWidth];
  low.store(wide);
  high.store(wide + kWidth / 2);
  for (int i = 0; i < kWidth; ++i) narrow[i] = static_cast<float>(wide[i]);
  return at::vec::Vectorized<float>::loadu(narrow);
#endif
}

}  // namespace ampfuse::CPU_CAPABILITY
