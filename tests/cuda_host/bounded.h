// Numbers with a bound on their error, for references of kernels.
#pragma once

#include <algorithm>
#include <cmath>

#include "numbers.h"

// The exact result of a computation and a bound on the error of the same computation in `type`.
// Every operation propagates the errors of its operands and adds its own rounding, half an ulp of
// the result (running error analysis). So tolerances follow from the formulae, even if terms
// cancel.
struct Bounded {
  long double value;
  Type type;
  long double error = 0;

  // Adds the rounding to the nearest number of `type` to `error`, the bound before rounding.
  static Bounded rounded(Type type, long double value, long double error = 0) {
    const long double unit = std::ldexp(1.0L, -format_of(type).digits);
    return {value, type, error + unit * (std::fabs(value) + error) + last_place(type, 0) / 2};
  }

  Bounded in(Type other) const { return rounded(other, value, error); }
  bool admits(long double x) const { return std::fabs(x - value) <= error; }

  friend Bounded operator+(const Bounded& a, const Bounded& b) {
    return rounded(a.type, a.value + b.value, a.error + b.error);
  }
  friend Bounded operator-(const Bounded& a, const Bounded& b) {
    return rounded(a.type, a.value - b.value, a.error + b.error);
  }
  friend Bounded operator*(const Bounded& a, const Bounded& b) {
    return rounded(a.type, a.value * b.value,
                   std::fabs(a.value) * b.error + std::fabs(b.value) * a.error + a.error * b.error);
  }
  friend Bounded operator/(const Bounded& a, const Bounded& b) {
    const long double quotient = a.value / b.value;
    return rounded(a.type, quotient,
                   (a.error + std::fabs(quotient) * b.error) / (std::fabs(b.value) - b.error));
  }
  // |√(a+e) − √a| = |e| / (√(a+e) + √a), at most |e| / √a.
  friend Bounded sqrt(const Bounded& a) {
    const long double root = std::sqrt(a.value);
    return rounded(a.type, root, a.error / root);
  }
  friend Bounded larger(const Bounded& a, const Bounded& b) {
    return {std::max(a.value, b.value), a.type, std::max(a.error, b.error)};
  }
};
