// One step of Adam or AdamW.
//
// With g the gradient, m and v its running mean and mean square, t the number of this step:
//
//   AdamW: p ← p − lr·wd·p        Adam: g ← g + wd·p
//   m ← m + (1−β₁)·(g − m)
//   v ← β₂·v + (1−β₂)·g²                     amsgrad: the largest v so far takes its place below
//   p ← p − lr/(1−β₁ᵗ) · m / (√v/√(1−β₂ᵗ) + eps)
//
// What does not depend on the element is computed once per tensor, in double: the last line is
// p − size·m / (√v + floor), with size = lr·√(1−β₂ᵗ)/(1−β₁ᵗ) and floor = eps·√(1−β₂ᵗ).
#pragma once

#include <cmath>
#include <cstdint>

#include "lane.h"
#include "multi_tensor_clip.h"

namespace ampfuse::math {

// What a step reads and writes of each element, in lists that kernels see as columns of a table.
// kMaxExpAvgSq with amsgrad; kMaster where the parameter is only the 16-bit copy of the number that
// is stepped: that number in fp32, or the 16 bits which the parameter lacks (remainder.h).
enum AdamColumn { kParam, kGrad, kExpAvg, kExpAvgSq, kMaxExpAvgSq, kMaster, kAdamColumns };

// What a call asks for, the same for all its tensors.
struct AdamOptions {
  double beta1;
  double beta2;
  double weight_decay;
  double eps;
  bool amsgrad;
  bool maximize;
  bool decoupled;  // weight decay: AdamW's, else Adam's
  bool write_back_grads;
  bool adopt_params;  // masters take over what somebody else wrote into their parameters
};

// The same in the precision of the arithmetic.
template <typename acc_t>
struct AdamConstants {
  acc_t beta1;
  acc_t one_minus_beta1;
  acc_t beta2;
  acc_t one_minus_beta2;
  acc_t l2;  // weight decay that joins the gradient
  bool maximize;
  bool write_back_grads;
  bool adopt_params;
};

template <typename acc_t>
AMPFUSE_HOST_DEVICE AdamConstants<acc_t> adam_constants(const AdamOptions& options) {
  return {static_cast<acc_t>(options.beta1),
          static_cast<acc_t>(1 - options.beta1),
          static_cast<acc_t>(options.beta2),
          static_cast<acc_t>(1 - options.beta2),
          static_cast<acc_t>(options.decoupled ? 0 : options.weight_decay),
          options.maximize,
          options.write_back_grads,
          options.adopt_params};
}

// What a tensor's step needs besides.
template <typename acc_t>
struct AdamStep {
  acc_t size;
  acc_t floor;
  acc_t decay;  // lr·wd where weight decay is decoupled. Not 1 − lr·wd: rounded to fp32 that would
                // be wrong by up to 3e-8 a step, always in the same direction.
};

// `step` counts this one.
template <typename acc_t>
AMPFUSE_HOST_DEVICE AdamStep<acc_t> adam_step(const AdamOptions& options, double lr, double step) {
  const double correction1 = 1 - std::pow(options.beta1, step);
  const double root2 = std::sqrt(1 - std::pow(options.beta2, step));
  return {static_cast<acc_t>(lr * root2 / correction1), static_cast<acc_t>(options.eps * root2),
          static_cast<acc_t>(options.decoupled ? lr * options.weight_decay : 0)};
}

// Whether a parameter was written by somebody else: it is not its master, rounded, any more.
template <typename param_t>
AMPFUSE_HOST_DEVICE bool is_written_over(param_t param, float master) {
  const auto now = static_cast<float>(param);
  const auto then = static_cast<float>(static_cast<param_t>(master));
  return now != then && (now == now || then == then);
}

// A float master from here on: the parameter where that was written, else what it was.
template <typename param_t>
AMPFUSE_HOST_DEVICE float adopted(param_t param, float master) {
  return is_written_over(param, master) ? static_cast<float>(param) : master;
}

// The inverse of this loss scale, and of every smaller one, is not a finite float: gradients that
// it multiplied would be infinite or NaN.
inline constexpr float kLargestScaleWithoutInverse = 0x1p-128f;

// Whether a step is to be skipped. `found_inf` may be any number but 0, since flags are added up
// over devices and processes.
AMPFUSE_HOST_DEVICE bool skips_step(float found_inf, float grad_scale) {
  return found_inf != 0 || !(std::fabs(grad_scale) > kLargestScaleWithoutInverse);
}

// What a scaled gradient's norm says about the step.
struct AdamGradients {
  double norm;    // of the unscaled gradients
  double factor;  // for them: the inverse of the loss scale, times the clip factor
};

AMPFUSE_HOST_DEVICE AdamGradients adam_gradients(double grad_scale, bool clip, double total_norm,
                                                 double max_norm) {
  const double unscale = 1 / grad_scale;
  const double norm = total_norm * unscale;
  return {norm, clip ? unscale * clip_factor(norm, max_norm) : unscale};
}

template <typename V>
struct AdamElement {
  V param;
  V exp_avg;
  V exp_avg_sq;
  V max_exp_avg_sq;  // with amsgrad
};

// `grad` is unscaled already. The branches are the same for all elements of a call. Products that
// are added to something are written as fused, so that the bits do not depend on which of them a
// compiler would fuse in which instance of this template: a number and its fp32 master must step
// alike.
template <bool kAmsgrad, typename V, typename acc_t>
AMPFUSE_HOST_DEVICE AdamElement<V> adam_update(AdamElement<V> x, V grad,
                                               const AdamConstants<acc_t>& constants,
                                               const AdamStep<acc_t>& step) {
  using L = Lane<V>;
  if (constants.maximize) grad = V(0) - grad;
  if (constants.l2 != 0) grad = L::multiply_add(V(constants.l2), x.param, grad);
  if (step.decay != 0) x.param = L::multiply_add(V(-step.decay), x.param, x.param);
  // From the nearer side: with β₁ = 0 the mean is exactly the gradient.
  x.exp_avg = constants.beta1 >= acc_t(0.5)
                  ? L::multiply_add(V(constants.one_minus_beta1), grad - x.exp_avg, x.exp_avg)
                  : L::multiply_add(V(constants.beta1), x.exp_avg - grad, grad);
  x.exp_avg_sq =
      L::multiply_add(V(constants.one_minus_beta2) * grad, grad, V(constants.beta2) * x.exp_avg_sq);
  V spread = x.exp_avg_sq;
  if constexpr (kAmsgrad) {
    x.max_exp_avg_sq = L::larger(x.max_exp_avg_sq, x.exp_avg_sq);
    spread = x.max_exp_avg_sq;
  }
  x.param = L::multiply_add(V(-step.size), x.exp_avg / (L::sqrt(spread) + V(step.floor)), x.param);
  return x;
}

}  // namespace ampfuse::math
