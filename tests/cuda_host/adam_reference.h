// A step of Adam or AdamW for one element in long double, by torch's formulae, with a bound on the
// error of the same operations in acc_t.
#pragma once

#include <algorithm>
#include <cmath>
#include <limits>

#include "adam_on_host.h"

// The exact result of a computation and a bound on the error of the same computation in T. Every
// operation propagates the errors of its operands and adds its own rounding, half an ulp of the
// result (running error analysis). So tolerances follow from the formulae, even if terms cancel.
template <typename T>
struct Bounded {
  long double value;
  long double error = 0;

  // Adds the rounding to the nearest T to `error`, the bound on the error before rounding.
  static Bounded rounded(long double value, long double error) {
    using Limits = std::numeric_limits<T>;
    const long double unit = std::ldexp(1.0L, -Limits::digits);
    const long double subnormal_unit = std::ldexp(1.0L, Limits::min_exponent - Limits::digits - 1);
    return {value, error + unit * (std::fabs(value) + error) + subnormal_unit};
  }

  template <typename U>
  Bounded<U> to() const {
    return Bounded<U>::rounded(value, error);
  }

  bool admits(long double x) const { return std::fabs(x - value) <= error; }

  friend Bounded operator+(const Bounded& a, const Bounded& b) {
    return rounded(a.value + b.value, a.error + b.error);
  }
  friend Bounded operator-(const Bounded& a, const Bounded& b) {
    return rounded(a.value - b.value, a.error + b.error);
  }
  friend Bounded operator*(const Bounded& a, const Bounded& b) {
    return rounded(a.value * b.value,
                   std::fabs(a.value) * b.error + std::fabs(b.value) * a.error + a.error * b.error);
  }
  friend Bounded operator/(const Bounded& a, const Bounded& b) {
    const long double quotient = a.value / b.value;
    return rounded(quotient,
                   (a.error + std::fabs(quotient) * b.error) / (std::fabs(b.value) - b.error));
  }
  // |√(a+e) − √a| = |e| / (√(a+e) + √a), at most |e| / √a.
  friend Bounded sqrt(const Bounded& a) {
    const long double root = std::sqrt(a.value);
    return rounded(root, a.error / root);
  }
  friend Bounded larger(const Bounded& a, const Bounded& b) {
    return {std::max(a.value, b.value), std::max(a.error, b.error)};
  }
};

template <typename acc_t>
using BoundedElement = ampfuse::math::AdamElement<Bounded<acc_t>>;

// Values that depend only on the step are computed in double and then rounded to acc_t, as torch
// computes them on the host.
template <typename acc_t>
class AdamReference {
 public:
  // `step` includes this step. Gradients are multiplied by `grad_factor`.
  AdamReference(const ampfuse::math::AdamOptions& options, double lr, double step,
                double grad_factor)
      : options_(options),
        step_size_((Bounded<double>{lr} / correction(options.beta1, step)).template to<acc_t>()),
        root2_(sqrt(correction(options.beta2, step)).template to<acc_t>()),
        decay_((Bounded<double>{lr} * Bounded<double>{options.weight_decay}).template to<acc_t>()),
        grad_factor_(constant(grad_factor)) {}

  BoundedElement<acc_t> operator()(BoundedElement<acc_t> x, acc_t scaled_grad) const {
    using B = Bounded<acc_t>;
    B grad = B{scaled_grad} * grad_factor_;
    if (options_.maximize) grad.value = -grad.value;
    if (options_.decoupled) {
      x.param = x.param - decay_ * x.param;
    } else {
      grad = grad + constant(options_.weight_decay) * x.param;
    }
    x.exp_avg = x.exp_avg + constant(1 - options_.beta1) * (grad - x.exp_avg);
    x.exp_avg_sq =
        constant(options_.beta2) * x.exp_avg_sq + constant(1 - options_.beta2) * grad * grad;
    x.max_exp_avg_sq = larger(x.max_exp_avg_sq, x.exp_avg_sq);
    const B spread = options_.amsgrad ? x.max_exp_avg_sq : x.exp_avg_sq;
    const B denominator = sqrt(spread) / root2_ + constant(options_.eps);
    x.param = x.param - step_size_ * (x.exp_avg / denominator);
    return x;
  }

 private:
  static Bounded<acc_t> constant(double x) { return Bounded<acc_t>::rounded(x, 0); }

  // Returns 1 − βᵗ. pow is off by less than an ulp. The closer βᵗ is to 1, the larger that error is
  // relative to the result.
  static Bounded<double> correction(double beta, double step) {
    const long double power = std::pow(static_cast<long double>(beta), step);
    return Bounded<double>{1} - Bounded<double>::rounded(power, power * 0x1p-53L);
  }

  ampfuse::math::AdamOptions options_;
  Bounded<acc_t> step_size_;
  Bounded<acc_t> root2_;
  Bounded<acc_t> decay_;
  Bounded<acc_t> grad_factor_;
};

// The number of elements of each column outside the reference's bounds, which include the rounding
// to the column's type.
using Misses = std::array<int, ampfuse::math::kAdamColumns>;

template <typename Types>
Misses misses(const FakeAdamTensors<Types>& before, const FakeAdamTensors<Types>& after,
              const ampfuse::math::AdamOptions& options, double lr, double grad_factor) {
  using acc_t = typename Types::acc_t;
  using state_t = typename Types::state_t;
  constexpr bool kHasMaster = FakeAdamTensor<Types>::kHasMaster;
  Misses misses = {};
  for (size_t t = 0; t < before.size(); ++t) {
    const FakeAdamTensor<Types>& from = before[t];
    const FakeAdamTensor<Types>& to = after[t];
    const AdamReference<acc_t> reference(options, lr, from.steps_taken + 1.0, grad_factor);
    const auto state = [](const auto& column, int64_t i) {
      return Bounded<acc_t>{static_cast<acc_t>(column.data()[i])};
    };
    const auto compare = [&misses](int column, const auto& expected, auto actual) {
      misses[column] += !expected.admits(static_cast<acc_t>(actual));
    };
    for (int64_t i = 0; i < from.size; ++i) {
      BoundedElement<acc_t> x = {
          {from.number(i)}, state(from.exp_avg, i), state(from.exp_avg_sq, i), {0}};
      if constexpr (Types::kAmsgrad) x.max_exp_avg_sq = state(from.max_exp_avg_sq, i);
      x = reference(x, static_cast<acc_t>(from.grad.data()[i]));
      compare(ampfuse::math::kExpAvg, x.exp_avg.template to<state_t>(), to.exp_avg.data()[i]);
      compare(ampfuse::math::kExpAvgSq, x.exp_avg_sq.template to<state_t>(),
              to.exp_avg_sq.data()[i]);
      if constexpr (Types::kAmsgrad) {
        compare(ampfuse::math::kMaxExpAvgSq, x.max_exp_avg_sq.template to<state_t>(),
                to.max_exp_avg_sq.data()[i]);
      }
      if constexpr (kHasMaster) {
        compare(ampfuse::math::kMaster, x.param, to.number(i));
      } else {
        compare(ampfuse::math::kParam, x.param.template to<typename Types::param_t>(),
                to.number(i));
      }
    }
  }
  return misses;
}
