// A step of Adam or AdamW for one element in long double, by torch's formulae, with a bound on the
// error of the same operations in the arithmetic of the kernel.
#pragma once

#include <cmath>

#include "bounded.h"
#include "step_on_host.h"

struct BoundedElement {
  Bounded param;
  Bounded exp_avg;
  Bounded exp_avg_sq;
  Bounded max_exp_avg_sq;
};

// Values that depend only on the step are computed in double and then rounded to the type of the
// arithmetic, as torch computes them on the host.
class AdamReference {
 public:
  // `step` includes this step. Gradients are multiplied by `grad_factor`.
  AdamReference(const StepKind& kind, const AdamStepOptions& options, double lr, double step,
                double grad_factor)
      : type_(arithmetic_of(kind.param)),
        amsgrad_(kind.moments == 3),
        options_(options),
        step_size_((Bounded{lr, kDouble} / correction(options.beta1, step)).in(type_)),
        root2_(sqrt(correction(options.beta2, step)).in(type_)),
        decay_((Bounded{lr, kDouble} * Bounded{options.weight_decay, kDouble}).in(type_)),
        grad_factor_(constant(grad_factor)) {}

  BoundedElement operator()(BoundedElement x, Bounded grad) const {
    grad = grad * grad_factor_;
    if (options_.step.maximize) grad.value = -grad.value;
    if (options_.decoupled) {
      x.param = x.param - decay_ * x.param;
    } else {
      grad = grad + constant(options_.weight_decay) * x.param;
    }
    x.exp_avg = x.exp_avg + constant(1 - options_.beta1) * (grad - x.exp_avg);
    x.exp_avg_sq =
        constant(options_.beta2) * x.exp_avg_sq + constant(1 - options_.beta2) * grad * grad;
    x.max_exp_avg_sq = larger(x.max_exp_avg_sq, x.exp_avg_sq);
    const Bounded spread = amsgrad_ ? x.max_exp_avg_sq : x.exp_avg_sq;
    const Bounded denominator = sqrt(spread) / root2_ + constant(options_.eps);
    x.param = x.param - step_size_ * (x.exp_avg / denominator);
    return x;
  }

 private:
  Bounded constant(double x) const { return Bounded::rounded(type_, x); }

  // Returns 1 − βᵗ. pow is off by less than an ulp. The closer βᵗ is to 1, the larger that error is
  // relative to the result.
  static Bounded correction(double beta, double step) {
    const long double power = std::pow(static_cast<long double>(beta), step);
    return Bounded{1, kDouble} - Bounded::rounded(kDouble, power, power * 0x1p-53L);
  }

  Type type_;
  bool amsgrad_;
  AdamStepOptions options_;
  Bounded step_size_;
  Bounded root2_;
  Bounded decay_;
  Bounded grad_factor_;
};

using Misses = std::array<int, kMostColumns>;

// Returns the number of elements of each column outside the reference's bounds, which include the
// rounding to the column's type.
inline Misses misses(const FakeStepTensors& before, const FakeStepTensors& after,
                     const AdamStepOptions& options, double lr, double grad_factor) {
  Misses misses = {};
  for (size_t t = 0; t < before.size(); ++t) {
    const FakeStepTensor& from = before[t];
    const FakeStepTensor& to = after[t];
    const StepKind& kind = from.kind;
    const Type type = arithmetic_of(kind.param);
    const AdamReference reference(kind, options, lr, from.steps_taken + 1.0, grad_factor);
    const auto compare = [&](int column, const Bounded& expected, double actual) {
      misses[column] += !expected.admits(actual);
    };
    for (int64_t i = 0; i < from.size; ++i) {
      const Bounded largest = {kind.moments == 3 ? from[kMaxExpAvgSq][i] : 0, type};
      const BoundedElement x = reference(
          {{from.number(i), type}, {from[kExpAvg][i], type}, {from[kExpAvgSq][i], type}, largest},
          {from[kGrad][i], type});
      compare(kExpAvg, x.exp_avg.in(kind.state), to[kExpAvg][i]);
      compare(kExpAvgSq, x.exp_avg_sq.in(kind.state), to[kExpAvgSq][i]);
      if (kind.moments == 3) {
        compare(kMaxExpAvgSq, x.max_exp_avg_sq.in(kind.state), to[kMaxExpAvgSq][i]);
      }
      const bool has_master = kind.master != Master::kNone;
      compare(has_master ? kMaster : kParam, has_master ? x.param : x.param.in(kind.param),
              to.number(i));
    }
  }
  return misses;
}
