// One step of Adam or AdamW.
//
// g is the gradient, m and v are its running mean and mean square, t is the number of this step:
//
//   AdamW: p ← p − lr·wd·p        Adam: g ← g + wd·p
//   m ← m + (1−β₁)·(g − m)
//   v ← β₂·v + (1−β₂)·g²                     amsgrad: the last line uses the largest v so far
//   p ← p − lr/(1−β₁ᵗ) · m / (√v/√(1−β₂ᵗ) + eps)
//
// Values that do not depend on the element are computed once per tensor, in double. The last line
// becomes p − size·m / (√v + floor), with size = lr·√(1−β₂ᵗ)/(1−β₁ᵗ) and floor = eps·√(1−β₂ᵗ).
#pragma once

#include "fused_step.h"

namespace ampfuse::math {

// The columns of the moments. kMaxExpAvgSq is used with amsgrad only.
enum AdamColumn { kExpAvg = kFirstMoment, kExpAvgSq, kMaxExpAvgSq };

struct AdamOptions {
  double beta1;
  double beta2;
  double weight_decay;
  double eps;
  bool decoupled;  // true for the weight decay of AdamW, false for that of Adam
};

template <typename acc_t>
struct AdamConstants {
  acc_t beta1;
  acc_t one_minus_beta1;
  acc_t beta2;
  acc_t one_minus_beta2;
  acc_t l2;  // weight decay that is added to the gradient

  AMPFUSE_HOST_DEVICE explicit AdamConstants(const AdamOptions& options)
      : beta1(static_cast<acc_t>(options.beta1)),
        one_minus_beta1(static_cast<acc_t>(1 - options.beta1)),
        beta2(static_cast<acc_t>(options.beta2)),
        one_minus_beta2(static_cast<acc_t>(1 - options.beta2)),
        l2(static_cast<acc_t>(options.decoupled ? 0 : options.weight_decay)) {}
};

template <typename acc_t>
struct AdamStep {
  acc_t size;
  acc_t floor;
  acc_t decay;  // lr·wd for decoupled weight decay. Not 1 − lr·wd: rounded to fp32 that would be
                // wrong by up to 3e-8 per step, always in the same direction.

  template <typename other_t>
  AMPFUSE_HOST_DEVICE AdamStep<other_t> as() const {
    return {static_cast<other_t>(size), static_cast<other_t>(floor), static_cast<other_t>(decay)};
  }
};

struct AdamRule {
  static constexpr int kMoments = 3;
  static constexpr int kCounts[] = {2, 3};  // without and with amsgrad
  using Options = AdamOptions;
  template <typename acc_t>
  using Constants = AdamConstants<acc_t>;
  template <typename acc_t>
  using Step = AdamStep<acc_t>;

  template <typename acc_t>
  static AMPFUSE_HOST_DEVICE AdamStep<acc_t> step(const AdamOptions& options, double lr,
                                                  double count) {
    const double correction1 = 1 - std::pow(options.beta1, count);
    const double root2 = std::sqrt(1 - std::pow(options.beta2, count));
    return AdamStep<double>{lr * root2 / correction1, options.eps * root2,
                            options.decoupled ? lr * options.weight_decay : 0}
        .as<acc_t>();
  }

  // The branches are the same for all elements of a call. Products that are added to something are
  // explicitly fused. Otherwise the bits would depend on which products the compiler fuses in each
  // instance of this template, and an fp32 parameter and an equal fp32 master must get the same
  // bits.
  template <int kCount, typename V, typename acc_t>
  static AMPFUSE_HOST_DEVICE StepElement<V, kCount> update(StepElement<V, kCount> x, V grad,
                                                           const AdamConstants<acc_t>& constants,
                                                           const AdamStep<acc_t>& step) {
    using L = Lane<V>;
    V& exp_avg = x.moments[0];
    V& exp_avg_sq = x.moments[1];
    if (constants.l2 != 0) grad = L::multiply_add(V(constants.l2), x.param, grad);
    if (step.decay != 0) x.param = L::multiply_add(V(-step.decay), x.param, x.param);
    // Interpolate from the nearer end, so that with β₁ = 0 the mean is exactly the gradient.
    exp_avg = constants.beta1 >= acc_t(0.5)
                  ? L::multiply_add(V(constants.one_minus_beta1), grad - exp_avg, exp_avg)
                  : L::multiply_add(V(constants.beta1), exp_avg - grad, grad);
    exp_avg_sq =
        L::multiply_add(V(constants.one_minus_beta2) * grad, grad, V(constants.beta2) * exp_avg_sq);
    V spread = exp_avg_sq;
    if constexpr (kCount == 3) {
      V& max_exp_avg_sq = x.moments[2];
      max_exp_avg_sq = L::larger(max_exp_avg_sq, exp_avg_sq);
      spread = max_exp_avg_sq;
    }
    x.param = L::multiply_add(V(-step.size), exp_avg / (L::sqrt(spread) + V(step.floor)), x.param);
    return x;
  }
};

}  // namespace ampfuse::math
