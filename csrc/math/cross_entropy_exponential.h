// exp of what a softmax sums up, relative to a reference that is not below any of it; of a vector
// register or of one number.
//
// exp z = 2ⁿ·exp r with |r| ≤ log 2 / 2, and exp r = 1 + r + r²·P(r), P of degree 4 by Remez's
// algorithm, off by 2⁻²⁸ of the result. The reference is itself a multiple of log 2, so that the
// difference to it is one of integers: z − m would be rounded, which costs up to 32 ulps of exp.
// Where the largest z is beyond ±256 it is subtracted first: that is exact then, since of numbers
// within a factor of two, and others are too far below to count.
//
// Results come times 2^kExponentBias: down to 114 below the reference they are normal then, where
// exp itself would be subnormal from 87 on, and lose digits that a loss scale could bring back.
// Further below they are 0.
#pragma once

#include <cmath>

#include "lane.h"

namespace ampfuse::math {

inline constexpr int kExponentBias = 40;
inline constexpr double kUnbias = 1.0 / (1ull << kExponentBias);
inline constexpr float kFurthestBelow = 114;
inline constexpr float kSmallestUnbiased = 0x1p-80;  // factors below do not take kUnbias, too

inline constexpr double kLog2 = 0.693147180559945309417;
inline constexpr float kExpRounder = 12582912.0f + kExponentBias;  // 1.5·2²³ rounds to integers

// Of one row, R being float, or of a vector of rows.
template <typename R>
struct ExpReferenceOf {
  R shift;
  R rounder;  // adding it to (z − shift)/log 2 leaves the power of two in the low bits
  R floor;    // below it exp is 0

  AMPFUSE_HOST_DEVICE double value() const {
    const double powers = static_cast<double>(kExpRounder) - rounder;
    return shift + powers * kLog2;
  }
};
using ExpReference = ExpReferenceOf<float>;

// For a finite `largest`.
template <typename V>
AMPFUSE_HOST_DEVICE ExpReferenceOf<V> exp_reference(V largest) {
  using L = Lane<V>;
  const auto is_far = L::abs(largest) >= V(256);
  const V powers = L::choose(is_far, V(0), L::ceil(largest * V(1.44269504f)));
  return {L::choose(is_far, largest, V(0)), V(kExpRounder) - powers, largest - V(kFurthestBelow)};
}

template <typename V>
struct ReducedExponent {
  V rounded;  // the power of two, in the low bits
  V n;
  V high;  // r, but for n times the second part of log 2
};

template <typename V, typename R>
AMPFUSE_HOST_DEVICE ReducedExponent<V> reduce_exponent(V z, const ExpReferenceOf<R>& reference) {
  using L = Lane<V>;
  const V d = z - V(reference.shift);
  const V rounded = L::multiply_add(d, V(1.44269504f), V(reference.rounder));
  const V n = rounded - V(reference.rounder);
  // log 2 in two parts, the first of so few bits that n times it is exact.
  return {rounded, n, L::multiply_add(n, V(-0.693359375f), d)};
}
inline constexpr float kMinusLog2Low = 2.12194440e-4f;

// r + r²·P(r) + r_low
template <typename V>
AMPFUSE_HOST_DEVICE V exp_without_one(V r, V r_low) {
  using L = Lane<V>;
  V p = L::multiply_add(V(1.3814599e-3f), r, V(8.3687169e-3f));
  p = L::multiply_add(p, r, V(4.1668388e-2f));
  p = L::multiply_add(p, r, V(0.16666521f));
  p = L::multiply_add(p, r, V(0.49999993f));
  return L::multiply_add(p, r * r, r_low);
}

// exp(z − reference)·2^kExponentBias, off by an ulp at most.
template <typename V, typename R>
AMPFUSE_HOST_DEVICE V biased_exp(V z, const ExpReferenceOf<R>& reference) {
  using L = Lane<V>;
  const auto [rounded, n, high] = reduce_exponent(z, reference);
  const V r = L::multiply_add(n, V(kMinusLog2Low), high);
  const V power = L::times_power(V(1) + exp_without_one(r, r), rounded);
  return L::from_floor_on(z, V(reference.floor), power);
}

// The same as the sum of two numbers, off by 2⁻²⁷ of it.
template <typename V>
struct InTwo {
  V high;
  V low;
};

template <typename V, typename R>
AMPFUSE_HOST_DEVICE InTwo<V> biased_exp_in_two(V z, const ExpReferenceOf<R>& reference) {
  using L = Lane<V>;
  const V floor(reference.floor);
  // Of −∞ these would be no numbers, which zero times is none either.
  const auto [rounded, n, first] = reduce_exponent(L::at_least(z, floor), reference);
  const V r = L::multiply_add(n, V(kMinusLog2Low), first);
  const V r_low = L::multiply_add(n, V(kMinusLog2Low), first - r);
  // Sums of two in which the first is not smaller, and what they round away.
  const V one = V(1) + r;
  const V rest = ((V(1) - one) + r) + exp_without_one(r, r_low);
  const V high = one + rest;
  const V low = (one - high) + rest;
  const V power = L::from_floor_on(z, floor, L::times_power(V(1), rounded));
  return {high * power, low * power};
}

// What biased exponentials are multiplied by, which takes the bias away: in two, so that products
// are not off by its rounding, too.
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
  // For exponentials that are rounded themselves.
  template <typename V>
  AMPFUSE_HOST_DEVICE V times(const V& e) const {
    return e * V(high) * V(unbias);
  }
};
using BiasedFactor = BiasedFactorOf<float>;

AMPFUSE_HOST_DEVICE BiasedFactor biased_factor(double factor) {
  // Apart, where the factor is so small that it would not be normal with it.
  const bool is_apart = std::fabs(factor) < kSmallestUnbiased;
  const double with_bias = is_apart ? factor : factor * kUnbias;
  const float high = static_cast<float>(with_bias);
  const double rest = with_bias - static_cast<double>(high);
  return {high, is_finite(rest) ? static_cast<float>(rest) : 0.0f,
          is_apart ? static_cast<float>(kUnbias) : 1.0f};
}

}  // namespace ampfuse::math
