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

#include <cmath>

#include "lane.h"
#include "multi_tensor_clip.h"

namespace ampfuse::math {

// The tensor lists that a step reads or writes; kernels see them as columns of a table.
// kMaxExpAvgSq is used with amsgrad only. kMaster is used if the parameter is a 16-bit copy of the
// number that is stepped. It holds that number in fp32, or the 16 bits that the parameter lacks
// (fused_adam_remainder.h).
enum AdamColumn { kParam, kGrad, kExpAvg, kExpAvgSq, kMaxExpAvgSq, kMaster, kAdamColumns };

// The options of a call, the same for all its tensors.
struct AdamOptions {
  double beta1;
  double beta2;
  double weight_decay;
  double eps;
  bool amsgrad;
  bool maximize;
  bool decoupled;  // true for the weight decay of AdamW, false for that of Adam
  bool write_back_grads;
  bool adopt_params;  // if other code wrote to a parameter, its master takes the new value
};

// The options in the precision of the arithmetic.
template <typename acc_t>
struct AdamConstants {
  acc_t beta1;
  acc_t one_minus_beta1;
  acc_t beta2;
  acc_t one_minus_beta2;
  acc_t l2;  // weight decay that is added to the gradient
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

// The values of a step that are the same for all elements of a tensor.
template <typename acc_t>
struct AdamStep {
  acc_t size;
  acc_t floor;
  acc_t decay;  // lr·wd for decoupled weight decay. Not 1 − lr·wd: rounded to fp32 that would be
                // wrong by up to 3e-8 per step, always in the same direction.
};

// `step` is the number of this step; the first one is 1.
template <typename acc_t>
AMPFUSE_HOST_DEVICE AdamStep<acc_t> adam_step(const AdamOptions& options, double lr, double step) {
  const double correction1 = 1 - std::pow(options.beta1, step);
  const double root2 = std::sqrt(1 - std::pow(options.beta2, step));
  return {static_cast<acc_t>(lr * root2 / correction1), static_cast<acc_t>(options.eps * root2),
          static_cast<acc_t>(options.decoupled ? lr * options.weight_decay : 0)};
}

// Returns true if other code wrote to a parameter: it no longer equals its rounded master. Two NaNs
// count as equal.
template <typename param_t>
AMPFUSE_HOST_DEVICE bool is_written_over(param_t param, float master) {
  const auto now = static_cast<float>(param);
  const auto then = static_cast<float>(static_cast<param_t>(master));
  return now != then && (now == now || then == then);
}

// Returns the new value of an fp32 master: the parameter if other code wrote to it, else the old
// master.
template <typename param_t>
AMPFUSE_HOST_DEVICE float adopted(param_t param, float master) {
  return is_written_over(param, master) ? static_cast<float>(param) : master;
}

// The inverse of this loss scale, and of every smaller one, is not a finite float. Gradients
// multiplied by it would be infinite or NaN.
inline constexpr float kLargestScaleWithoutInverse = 0x1p-128f;

// Returns true if the step must be skipped. `found_inf` is set if it is not 0; it may be larger
// than 1, since flags are summed over devices and ranks.
AMPFUSE_HOST_DEVICE bool skips_step(float found_inf, float grad_scale) {
  return found_inf != 0 || !(std::fabs(grad_scale) > kLargestScaleWithoutInverse);
}

// The norm of the unscaled gradients, and the factor to multiply the scaled gradients by.
struct AdamGradients {
  double norm;
  double factor;  // inverse of the loss scale, times the clip factor if gradients are clipped
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

// Returns the element after the step. `grad` is already unscaled. The branches are the same for all
// elements of a call. Products that are added to something are explicitly fused. Otherwise the bits
// would depend on which products the compiler fuses in each instance of this template, and an fp32
// parameter and an equal fp32 master must get the same bits.
template <bool kAmsgrad, typename V, typename acc_t>
AMPFUSE_HOST_DEVICE AdamElement<V> adam_update(AdamElement<V> x, V grad,
                                               const AdamConstants<acc_t>& constants,
                                               const AdamStep<acc_t>& step) {
  using L = Lane<V>;
  if (constants.maximize) grad = V(0) - grad;
  if (constants.l2 != 0) grad = L::multiply_add(V(constants.l2), x.param, grad);
  if (step.decay != 0) x.param = L::multiply_add(V(-step.decay), x.param, x.param);
  // Interpolate from the nearer end, so that with β₁ = 0 the mean is exactly the gradient.
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
