// Logits as vectors of what they are computed with.
#pragma once

#include <ATen/cpu/vec/functional.h>

#include <algorithm>
#include <limits>
#include <type_traits>

#include "cross_entropy.h"

namespace ampfuse::CPU_CAPABILITY {

/// What logits are computed with.
template <typename scalar_t>
using acc_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

template <typename scalar_t>
using AccVec = at::vec::Vectorized<acc_t<scalar_t>>;

template <typename scalar_t>
constexpr bool kIsNarrow = at::vec::is_reduced_floating_point_v<scalar_t>;

template <typename scalar_t>
constexpr acc_t<scalar_t> kInfinity = std::numeric_limits<acc_t<scalar_t>>::infinity();

/// Vectors that are taken at a time: as many as 16-bit logits become, and two chains of sums, so
/// that none waits for the last addition.
inline constexpr int kPair = 2;
template <typename scalar_t>
inline constexpr int64_t kStep = kPair * AccVec<scalar_t>::size();
static_assert(kClassBlock % kStep<float> == 0);

/// Calls visit(i, pair of vectors) for the logits from i on, with -infinity behind the end; and,
/// when `without_target`, for the target.
template <typename scalar_t, typename Visit>
void each_pair(const Logits& logits, bool without_target, const Visit& visit) {
  using Vec = AccVec<scalar_t>;
  constexpr int64_t kSize = kStep<scalar_t>;
  const scalar_t nothing = -kInfinity<scalar_t>;
  const auto* const x = static_cast<const scalar_t*>(logits.data);
  const int64_t apart = without_target && logits.target >= 0 ? logits.target / kSize * kSize : -1;
  scalar_t some[kSize];
  for (int64_t i = 0; i < logits.count; i += kSize) {
    const scalar_t* from = x + i;
    const int64_t rest = logits.count - i;
    if (i == apart || rest < kSize) {
      std::fill(std::copy_n(from, std::min(kSize, rest), some), some + kSize, nothing);
      if (i == apart) some[logits.target - i] = nothing;
      from = some;
    }
    // In one place, or what visit() adds up would not stay in registers.
    if constexpr (kIsNarrow<scalar_t>) {
      const auto [low, high] =
          at::vec::convert_to_float(at::vec::Vectorized<scalar_t>::loadu(from));
      const Vec pair[kPair] = {low, high};
      visit(i, pair);
    } else {
      const Vec pair[kPair] = {Vec::loadu(from), Vec::loadu(from + Vec::size())};
      visit(i, pair);
    }
  }
}

/// Calls call.operator()<scalar_t>() with the type of the logits.
template <typename Call>
auto with_logit_type(c10::ScalarType dtype, const Call& call) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return call.template operator()<c10::Half>();
    case c10::ScalarType::BFloat16:
      return call.template operator()<c10::BFloat16>();
    case c10::ScalarType::Float:
      return call.template operator()<float>();
    default:
      return call.template operator()<double>();
  }
}

}  // namespace ampfuse::CPU_CAPABILITY
