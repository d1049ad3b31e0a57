// exp(z − reference) for the terms of a softmax. V is a float or a vector register of floats. No z
// may be more than 60·log 2 above the reference; otherwise sums of biased results could overflow.
//
// exp z = 2ⁿ·exp r with |r| ≤ log 2 / 2, and exp r = 1 + r + r²·P(r). P has degree 4, comes from
// Remez's algorithm, and has an error of 2⁻²⁸ of the result. The reference is a multiple of log 2,
// so subtracting it subtracts integers from n, which is exact. Rounding z − largest instead would
// cost up to 32 ulps of exp. If the largest z is beyond ±256, it is the reference, and is
// subtracted from z first. That is exact for all z within a factor of two of it; any other z is so
// far below that its result is 0.
//
// Results are multiplied by 2^kExponentBias. This keeps them normal for every z down to 114 below
// the largest. Without the bias they would be subnormal from 87 below on, and lose digits that a
// large loss scale makes visible. For z more than 114 below, results are 0.
#pragma once

#include <cmath>

#include "lane.h"

namespace ampfuse::math {

inline constexpr int kExponentBias = 40;
inline constexpr double kUnbias = 1.0 / (1ull << kExponentBias);
inline constexpr float kFurthestBelow = 114;
// Smaller factors are not combined with kUnbias, since the product might not be normal.
inline constexpr float kSmallestUnbiased = 0x1p-80;

inline constexpr double kLog2 = 0.693147180559945309417;
// Adding 1.5·2²³ rounds a float to an integer. kExponentBias is added to that integer.
inline constexpr float kExpRounder = 12582912.0f + kExponentBias;

// The reference of one row (R = float) or of a vector of rows.
template <typename R>
struct ExpReferenceOf {
  R shift;
  R rounder;  // adding it to (z − shift)/log 2 leaves the power of two in the low bits
  R floor;    // the result is 0 for z below it

  AMPFUSE_HOST_DEVICE R powers() const { return R(kExpRounder) - rounder; }
  AMPFUSE_HOST_DEVICE double value() const { return shift + static_cast<double>(powers()) * kLog2; }
};
using ExpReference = ExpReferenceOf<float>;

// `largest` must be finite.
template <typename V>
AMPFUSE_HOST_DEVICE ExpReferenceOf<V> exp_reference(V largest) {
  using L = Lane<V>;
  const auto is_far = L::abs(largest) >= V(256);
  const V powers = L::choose(is_far, V(0), L::ceil(largest * V(1.44269504f)));
  return {L::choose(is_far, largest, V(0)), V(kExpRounder) - powers, largest - V(kFurthestBelow)};
}

template <typename V>
struct ReducedExponent {
  V rounded;  // the biased power of two, in the low bits
  V n;
  V high;  // z − shift − n·(first part of log 2); adding n·kMinusLog2Low gives r
};

template <typename V, typename R>
AMPFUSE_HOST_DEVICE ReducedExponent<V> reduce_exponent(V z, const ExpReferenceOf<R>& reference) {
  using L = Lane<V>;
  const V d = z - V(reference.shift);
  const V rounded = L::multiply_add(d, V(1.44269504f), V(reference.rounder));
  const V n = rounded - V(reference.rounder);
  // log 2 is split in two parts. The first has so few bits that n times it is exact.
  return {rounded, n, L::multiply_add(n, V(-0.693359375f), d)};
}
inline constexpr float kMinusLog2Low = 2.12194440e-4f;

// Returns r²·P(r) + r_low.
template <typename V>
AMPFUSE_HOST_DEVICE V exp_without_one(V r, V r_low) {
  using L = Lane<V>;
  V p = L::multiply_add(V(1.3814599e-3f), r, V(8.3687169e-3f));
  p = L::multiply_add(p, r, V(4.1668388e-2f));
  p = L::multiply_add(p, r, V(0.16666521f));
  p = L::multiply_add(p, r, V(0.49999993f));
  return L::multiply_add(p, r * r, r_low);
}

// Returns exp(z − reference)·2^kExponentBias with an error of at most one ulp.
template <typename V, typename R>
AMPFUSE_HOST_DEVICE V biased_exp(V z, const ExpReferenceOf<R>& reference) {
  using L = Lane<V>;
  const auto [rounded, n, high] = reduce_exponent(z, reference);
  const V r = L::multiply_add(n, V(kMinusLog2Low), high);
  const V power = L::times_power(V(1) + exp_without_one(r, r), rounded);
  return L::zero_below(z, V(reference.floor), power);
}

// A number stored as high + low, where `high` is the sum rounded to V. A biased exponential in this
// form has a relative error of at most 2⁻²⁷.
template <typename V>
struct InTwo {
  V high;
  V low;
};

template <typename V, typename R>
AMPFUSE_HOST_DEVICE InTwo<V> biased_exp_in_two(V z, const ExpReferenceOf<R>& reference) {
  using L = Lane<V>;
  const V floor(reference.floor);
  // Clamp first: z = −∞ would give NaN here, and NaN·0 is NaN.
  const auto [rounded, n, first] = reduce_exponent(L::at_least(z, floor), reference);
  const V r = L::multiply_add(n, V(kMinusLog2Low), first);
  const V r_low = L::multiply_add(n, V(kMinusLog2Low), first - r);
  // In these sums the first term is not the smaller one, so (first − sum) + second is exactly the
  // rounding error.
  const V one = V(1) + r;
  const V rest = ((V(1) - one) + r) + exp_without_one(r, r_low);
  const V high = one + rest;
  const V low = (one - high) + rest;
  const V power = L::zero_below(z, floor, L::times_power(V(1), rounded));
  return {high * power, low * power};
}

// A factor for biased exponentials, which also removes their bias. It is the sum of two numbers, so
// that its own rounding does not add to the error of the products.
template <typename R>
struct BiasedFactorOf {
  R high;
  R low;
  R unbias;

  template <typename V>
  AMPFUSE_HOST_DEVICE V times(const InTwo<V>& e) const {
    using L = Lane<V>;
    const V inner = L::multiply_add(e.low, V(high), e.high * V(low));
    return L::product(L::multiply_add(e.high, V(high), inner), V(unbias));
  }
  // For exponentials that are a single number; this ignores `low`.
  template <typename V>
  AMPFUSE_HOST_DEVICE V times(const V& e) const {
    return e * V(high) * V(unbias);
  }
};
using BiasedFactor = BiasedFactorOf<float>;

AMPFUSE_HOST_DEVICE BiasedFactor biased_factor(double factor) {
  const bool is_apart = std::fabs(factor) < kSmallestUnbiased;
  const double with_bias = is_apart ? factor : factor * kUnbias;
  const float high = static_cast<float>(with_bias);
  const double rest = with_bias - static_cast<double>(high);
  return {high, is_finite(rest) ? static_cast<float>(rest) : 0.0f,
          is_apart ? static_cast<float>(kUnbias) : 1.0f};
}

}  // namespace ampfuse::math
