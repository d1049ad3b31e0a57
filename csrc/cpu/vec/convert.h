// Conversions of arrays of 16-bit numbers to fp32 and back.
#pragma once

#include <ATen/cpu/vec/functional.h>

#include <algorithm>

#include "each_vector.h"

namespace ampfuse::CPU_CAPABILITY {

/// Converts 16-bit numbers to fp32.
template <typename scalar_t>
void widen(const scalar_t* from, float* to, int64_t count) {
  using Vec = at::vec::Vectorized<scalar_t>;
  constexpr int64_t kHalfVector = Vec::size() / 2;
  for_each_vector<Vec>(count, [&](int64_t i, int64_t rest) {
    const auto [low, high] = at::vec::convert_to_float(Vec::loadu(from + i, rest));
    low.store(to + i, std::min(kHalfVector, rest));
    if (rest > kHalfVector) high.store(to + i + kHalfVector, rest - kHalfVector);
  });
}

/// Rounds fp32 numbers to 16 bits.
template <typename scalar_t>
void narrow(const float* from, scalar_t* to, int64_t count) {
  using Vec = at::vec::Vectorized<scalar_t>;
  using Wide = at::vec::Vectorized<float>;
  constexpr int64_t kHalfVector = Vec::size() / 2;
  for_each_vector<Vec>(count, [&](int64_t i, int64_t rest) {
    const Wide low = Wide::loadu(from + i, std::min(kHalfVector, rest));
    const Wide high =
        rest > kHalfVector ? Wide::loadu(from + i + kHalfVector, rest - kHalfVector) : Wide(0);
    at::vec::convert_from_float<scalar_t>(low, high).store(to + i, rest);
  });
}

}  // namespace ampfuse::CPU_CAPABILITY
