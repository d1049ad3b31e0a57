// Logits as vectors of the arithmetic's type.
#pragma once

#include <ATen/cpu/vec/functional.h>

#include <algorithm>
#include <limits>
#include <tuple>
#include <type_traits>

#include "../../math/cross_entropy_exponential.h"
#include "cross_entropy.h"

namespace ampfuse::CPU_CAPABILITY {

/// The type of arithmetic for logits of type scalar_t.
template <typename scalar_t>
using acc_t = std::conditional_t<std::is_same_v<scalar_t, double>, double, float>;

template <typename scalar_t>
using AccVec = at::vec::Vectorized<acc_t<scalar_t>>;

template <typename scalar_t>
constexpr bool kIs16Bit = at::vec::is_reduced_floating_point_v<scalar_t>;

template <typename scalar_t>
constexpr acc_t<scalar_t> kInfinity = std::numeric_limits<acc_t<scalar_t>>::infinity();

/// The factor that removes the bias of exponentials (math/cross_entropy_exponential.h).
template <typename scalar_t>
constexpr double kUnbias = std::is_same_v<scalar_t, double> ? 1 : math::kUnbias;

/// The number of vectors that are processed at a time. A vector of 16-bit logits becomes two in
/// fp32, and with two chains of sums, no addition waits for the previous one.
inline constexpr int kPair = 2;
template <typename scalar_t>
inline constexpr int64_t kStep = kPair * AccVec<scalar_t>::size();
static_assert(kClassBlock % kStep<float> == 0);

/// Returns `x` with -infinity in the lanes from `end` on.
template <typename Vec>
Vec without_lanes_from(const Vec& x, int64_t end) {
  using A = typename Vec::value_type;
  const Vec nothing(-std::numeric_limits<A>::infinity());
  return Vec::blendv(x, nothing, Vec::arange(A(0), A(1)) >= Vec(static_cast<A>(end)));
}
/// Returns `x` with `value` in `lane`, if `x` has that lane.
template <typename Vec>
Vec with_lane(const Vec& x, int64_t lane, typename Vec::value_type value) {
  using A = typename Vec::value_type;
  return Vec::blendv(x, Vec(value), Vec::arange(A(0), A(1)) == Vec(static_cast<A>(lane)));
}

/// Returns `x`, a vector of numbers for the logits from i on, with -infinity in lanes without a
/// logit and in the target's lane.
template <typename Vec>
Vec without_target(const Logits& logits, int64_t i, const Vec& x) {
  using A = typename Vec::value_type;
  const Vec inside = logits.count - i < Vec::size() ? without_lanes_from(x, logits.count - i) : x;
  return with_lane(inside, logits.target < 0 ? -1 : logits.target - i,
                   -std::numeric_limits<A>::infinity());
}

/// Loads and widens the next kStep logits, or only `rest` if these are fewer.
template <typename scalar_t>
std::tuple<AccVec<scalar_t>, AccVec<scalar_t>> load_pair(const scalar_t* from, int64_t rest) {
  using Vec = AccVec<scalar_t>;
  constexpr int64_t kSize = Vec::size();
  const bool is_whole = rest >= kPair * kSize;
  if constexpr (kIs16Bit<scalar_t>) {
    using Narrow = at::vec::Vectorized<scalar_t>;
    return at::vec::convert_to_float(is_whole ? Narrow::loadu(from) : Narrow::loadu(from, rest));
  } else {
    if (is_whole) return {Vec::loadu(from), Vec::loadu(from + kSize)};
    return {Vec::loadu(from, std::min(rest, kSize)),
            rest > kSize ? Vec::loadu(from + kSize, rest - kSize) : Vec(0)};
  }
}

/// Loads and widens one vector of logits, or only `rest` if these are fewer.
template <typename scalar_t>
AccVec<scalar_t> load_one(const scalar_t* from, int64_t rest) {
  if constexpr (kIs16Bit<scalar_t>) {
    using Narrow = at::vec::Vectorized<scalar_t>;
    return std::get<0>(at::vec::convert_to_float(Narrow::loadu(from, rest)));
  } else {
    return AccVec<scalar_t>::loadu(from, rest);
  }
}

/// Calls visit(i, pair of vectors) for all logits; the pair has those from i on. Lanes after the
/// end are -infinity, and if `without_target` so is the target.
template <typename scalar_t, typename Visit>
void each_pair(const Logits& logits, bool without_target, const Visit& visit) {
  using Vec = AccVec<scalar_t>;
  constexpr int64_t kSize = kStep<scalar_t>;
  const auto* const x = static_cast<const scalar_t*>(logits.data);
  const int64_t apart = without_target && logits.target >= 0 ? logits.target / kSize * kSize : -1;
  for (int64_t i = 0; i < logits.count; i += kSize) {
    const int64_t rest = logits.count - i;
    auto [low, high] = load_pair(x + i, rest);
    if (rest < kSize) {
      low = without_lanes_from(low, rest);
      high = without_lanes_from(high, rest - Vec::size());
    }
    if (i == apart) {
      low = with_lane(low, logits.target - i, -kInfinity<scalar_t>);
      high = with_lane(high, logits.target - i - Vec::size(), -kInfinity<scalar_t>);
    }
    // There must be only one call of visit(): with two, its sums would not stay in registers.
    const Vec pair[kPair] = {low, high};
    visit(i, pair);
  }
}

/// Returns the largest of all logits, including the target. It may miss a NaN, which then shows in
/// the sum of exponentials.
template <typename scalar_t>
acc_t<scalar_t> largest_logit(const Logits& logits) {
  using Vec = AccVec<scalar_t>;
  Vec even(-kInfinity<scalar_t>);
  Vec odd = even;
  each_pair<scalar_t>(logits, /*without_target=*/false, [&](int64_t, const Vec(&x)[kPair]) {
    even = at::vec::clamp_min(x[0], even);
    odd = at::vec::clamp_min(x[1], odd);
  });
  return at::vec::vec_reduce_all<acc_t<scalar_t>>(
      [](const Vec& a, const Vec& b) { return at::vec::clamp_min(a, b); },
      at::vec::clamp_min(even, odd));
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

/// Calls call.operator()<out_t>() with the type of the gradient: the logits' type, or a 16-bit type
/// if the logits are float.
template <typename scalar_t, typename Call>
auto with_gradient_type(c10::ScalarType dtype, const Call& call) {
  if constexpr (std::is_same_v<scalar_t, float>) {
    if (dtype == c10::ScalarType::Half) return call.template operator()<c10::Half>();
    if (dtype == c10::ScalarType::BFloat16) return call.template operator()<c10::BFloat16>();
  }
  return call.template operator()<scalar_t>();
}

}  // namespace ampfuse::CPU_CAPABILITY
