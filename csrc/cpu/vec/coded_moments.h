// Conversions of moments in 8 bits to fp32 and back, a group at a time (math/coded_moment.h).
#pragma once

#include <algorithm>
#include <type_traits>

#include "../../math/stochastic_rounding.h"

#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
#include <immintrin.h>
#endif

namespace ampfuse::CPU_CAPABILITY {

// Loops over whole groups have a constant count, so that the compiler can make vector instructions
// of them. For conversions between bytes and numbers its own instructions are two to three times as
// many as needed.

template <typename code_t>
AMPFUSE_HOST_DEVICE void decode_group(const code_t* codes, uint16_t unit_bits, float* moments) {
  const float unit = __builtin_bit_cast(float, static_cast<uint32_t>(unit_bits) << 16);
  [[maybe_unused]] constexpr bool kIsSigned = std::is_signed_v<code_t>;
#if defined(CPU_CAPABILITY_AVX512)
  for (int half = 0; half < 2; ++half) {
    const __m128i bytes = _mm_loadu_si128(reinterpret_cast<const __m128i*>(codes + 16 * half));
    const __m512i code = kIsSigned ? _mm512_cvtepi8_epi32(bytes) : _mm512_cvtepu8_epi32(bytes);
    const __m512 root = _mm512_mul_ps(_mm512_cvtepi32_ps(code), _mm512_set1_ps(unit));
    _mm512_storeu_ps(moments + 16 * half, _mm512_mul_ps(root, _mm512_abs_ps(root)));
  }
#elif defined(CPU_CAPABILITY_AVX2)
  for (int quarter = 0; quarter < 4; ++quarter) {
    const __m128i bytes = _mm_loadl_epi64(reinterpret_cast<const __m128i*>(codes + 8 * quarter));
    const __m256i code = kIsSigned ? _mm256_cvtepi8_epi32(bytes) : _mm256_cvtepu8_epi32(bytes);
    const __m256 root = _mm256_mul_ps(_mm256_cvtepi32_ps(code), _mm256_set1_ps(unit));
    const __m256 magnitude = _mm256_andnot_ps(_mm256_set1_ps(-0.0f), root);
    _mm256_storeu_ps(moments + 8 * quarter, _mm256_mul_ps(root, magnitude));
  }
#else
  for (int i = 0; i < math::kCodeGroup; ++i) {
    moments[i] = math::decode_moment(static_cast<float>(codes[i]), unit);
  }
#endif
}

// Groups whose largest roots are found together: one for each lane of 256 bits.
constexpr int kGroupsAtOnce = 8;

// Stores the bits of the largest magnitude of each of these groups.
inline void find_largest(const float* roots, uint32_t* largest) {
#if defined(CPU_CAPABILITY_AVX2) || defined(CPU_CAPABILITY_AVX512)
  // Each turn makes one register of two, with the numbers of both in half as many lanes each.
  const __m256i magnitude = _mm256_set1_epi32(0x7fffffff);
  __m256i x[kGroupsAtOnce];
  for (int g = 0; g < kGroupsAtOnce; ++g) {
    x[g] = _mm256_setzero_si256();
    for (int i = 0; i < math::kCodeGroup; i += 8) {
      const auto* const of_lanes =
          reinterpret_cast<const __m256i*>(roots + g * math::kCodeGroup + i);
      x[g] = _mm256_max_epu32(x[g], _mm256_and_si256(_mm256_loadu_si256(of_lanes), magnitude));
    }
  }
  for (int i = 0; i < 4; ++i) {
    x[i] = _mm256_max_epu32(_mm256_unpacklo_epi32(x[2 * i], x[2 * i + 1]),
                            _mm256_unpackhi_epi32(x[2 * i], x[2 * i + 1]));
  }
  for (int i = 0; i < 2; ++i) {
    x[i] = _mm256_max_epu32(_mm256_unpacklo_epi64(x[2 * i], x[2 * i + 1]),
                            _mm256_unpackhi_epi64(x[2 * i], x[2 * i + 1]));
  }
  x[0] = _mm256_max_epu32(_mm256_permute2x128_si256(x[0], x[1], 0x20),
                          _mm256_permute2x128_si256(x[0], x[1], 0x31));
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(largest), x[0]);
#else
  for (int g = 0; g < kGroupsAtOnce; ++g) {
    largest[g] = 0;
    for (int i = 0; i < math::kCodeGroup; ++i) {
      largest[g] = std::max(largest[g], math::magnitude_bits(roots[g * math::kCodeGroup + i]));
    }
  }
#endif
}

// Encodes all elements of a group as math::encode_root() does. kMoment is the number of the moment.
template <int kMoment, typename code_t>
AMPFUSE_HOST_DEVICE void encode_group(const float* roots, float factor, code_t* codes,
                                      const uint16_t* randoms) {
#if defined(CPU_CAPABILITY_AVX512)
  const __m512i random =
      _mm512_srli_epi16(_mm512_mullo_epi16(_mm512_loadu_si512(randoms),
                                           _mm512_set1_epi16(math::moment_factor(kMoment))),
                        16 - math::kCodeBits);
  for (int half = 0; half < 2; ++half) {
    const __m256i of_half =
        half == 0 ? _mm512_castsi512_si256(random) : _mm512_extracti64x4_epi64(random, 1);
    const __m512 root = _mm512_loadu_ps(roots + 16 * half);
    const __m512 magnitude = _mm512_abs_ps(root);
    const __m512 limited = _mm512_min_ps(_mm512_mul_ps(magnitude, _mm512_set1_ps(factor)),
                                         _mm512_set1_ps(math::kFixedLimit<code_t>));
    const __m512 sign = _mm512_xor_ps(root, magnitude);
    const __m512 sum = _mm512_add_ps(_mm512_or_ps(limited, sign), _mm512_set1_ps(0x1.8p23f));
    const __m512i fixed = _mm512_sub_epi32(_mm512_castps_si512(sum), _mm512_set1_epi32(0x4B400000));
    __m512i code =
        _mm512_srai_epi32(_mm512_add_epi32(fixed, _mm512_cvtepu16_epi32(of_half)), math::kCodeBits);
    if constexpr (kMoment > 0) {
      code = _mm512_max_epi32(
          code, _mm512_min_epu32(_mm512_castps_si512(magnitude), _mm512_set1_epi32(1)));
    }
    _mm_storeu_si128(reinterpret_cast<__m128i*>(codes + 16 * half), _mm512_cvtepi32_epi8(code));
  }
#elif defined(CPU_CAPABILITY_AVX2)
  __m256i words[2];
  for (int half = 0; half < 2; ++half) {
    const __m256i random = _mm256_srli_epi16(
        _mm256_mullo_epi16(
            _mm256_loadu_si256(reinterpret_cast<const __m256i*>(randoms + 16 * half)),
            _mm256_set1_epi16(math::moment_factor(kMoment))),
        16 - math::kCodeBits);
    __m256i quarters[2];
    for (int q = 0; q < 2; ++q) {
      const __m128i of_quarter =
          q == 0 ? _mm256_castsi256_si128(random) : _mm256_extracti128_si256(random, 1);
      const __m256 root = _mm256_loadu_ps(roots + 16 * half + 8 * q);
      const __m256 sign = _mm256_and_ps(root, _mm256_set1_ps(-0.0f));
      const __m256 magnitude = _mm256_xor_ps(root, sign);
      const __m256 limited = _mm256_min_ps(_mm256_mul_ps(magnitude, _mm256_set1_ps(factor)),
                                           _mm256_set1_ps(math::kFixedLimit<code_t>));
      const __m256 sum = _mm256_add_ps(_mm256_or_ps(limited, sign), _mm256_set1_ps(0x1.8p23f));
      const __m256i fixed =
          _mm256_sub_epi32(_mm256_castps_si256(sum), _mm256_set1_epi32(0x4B400000));
      quarters[q] = _mm256_srai_epi32(_mm256_add_epi32(fixed, _mm256_cvtepu16_epi32(of_quarter)),
                                      math::kCodeBits);
      if constexpr (kMoment > 0) {
        const __m256i least =
            _mm256_min_epu32(_mm256_castps_si256(magnitude), _mm256_set1_epi32(1));
        quarters[q] = _mm256_max_epi32(quarters[q], least);
      }
    }
    words[half] = _mm256_packs_epi32(quarters[0], quarters[1]);
  }
  const __m256i bytes = kMoment > 0 ? _mm256_packus_epi16(words[0], words[1])
                                    : _mm256_packs_epi16(words[0], words[1]);
  const __m256i order = _mm256_setr_epi32(0, 4, 1, 5, 2, 6, 3, 7);  // packs are per 128-bit lane
  _mm256_storeu_si256(reinterpret_cast<__m256i*>(codes), _mm256_permutevar8x32_epi32(bytes, order));
#else
  for (int i = 0; i < math::kCodeGroup; ++i) {
    codes[i] =
        math::encode_root<code_t>(roots[i], factor, math::random_of_moment(randoms[i], kMoment));
  }
#endif
}

// Decodes `count` moments. `moments` has room for whole groups.
template <typename code_t>
void decode(const code_t* codes, const uint16_t* units, float* moments, int64_t count) {
  constexpr int64_t kGroup = math::kCodeGroup;
  const int64_t whole = count / kGroup;
  for (int64_t g = 0; g < whole; ++g) {
    decode_group(codes + g * kGroup, units[g], moments + g * kGroup);
  }
  if (whole * kGroup == count) return;
  code_t last[kGroup] = {};
  std::copy(codes + whole * kGroup, codes + count, last);
  decode_group(last, units[whole], moments + whole * kGroup);
}

// Encodes `count` moments, given their signed roots. `roots` and `randoms` have room for kMost
// elements, a multiple of a group. Each stage is finished for all groups before the next begins: so
// no group waits for its largest root, and the divisions of all groups are vector instructions.
template <int kMoment, int64_t kMost, typename code_t>
void encode(float* roots, const uint16_t* randoms, code_t* codes, uint16_t* units, int64_t count) {
  constexpr int64_t kGroup = math::kCodeGroup;
  constexpr int64_t kGroups = kMost / kGroup;
  const int64_t whole = count / kGroup;
  const int64_t groups = (count + kGroup - 1) / kGroup;
  std::fill(roots + count, roots + kMost, 0.0f);
  uint32_t largest[kGroups];
  for (int64_t g = 0; g < kGroups; g += kGroupsAtOnce)
    find_largest(roots + g * kGroup, largest + g);
  uint32_t unit_bits[kGroups];
  float factors[kGroups];
  for (int64_t g = 0; g < kGroups; ++g) {
    const float unit = math::code_unit<code_t>(largest[g]);
    unit_bits[g] = __builtin_bit_cast(uint32_t, unit) >> 16;
    factors[g] = math::code_factor(unit);
  }
  std::copy_n(unit_bits, groups, units);
  for (int64_t g = 0; g < whole; ++g) {
    encode_group<kMoment>(roots + g * kGroup, factors[g], codes + g * kGroup, randoms + g * kGroup);
  }
  if (whole == groups) return;
  code_t last[kGroup];
  encode_group<kMoment>(roots + whole * kGroup, factors[whole], last, randoms + whole * kGroup);
  std::copy_n(last, count - whole * kGroup, codes + whole * kGroup);
}

}  // namespace ampfuse::CPU_CAPABILITY
