// The steps of all fused optimizers share masters, unscaling, clipping and skipping.
//
// A rule is the arithmetic of one optimizer, for example AdamRule in fused_adam.h:
//
//   kMoments               the most state tensors that a parameter has, besides step and master
//   Options                the options of a call, the same for all its tensors
//   Constants<acc_t>       the options in the precision of the arithmetic
//   Step<acc_t>            the values that are the same for all elements of a tensor
//   step<acc_t>(options, lr, count)              makes them; the first step has count 1
//   update<kCount>(x, grad, constants, step)     returns the element after the step
//
// kCount is the number of moments in use. It is the same for all tensors of a call. A rule lists in
// kCounts those that it knows, and kernels are compiled for these.
#pragma once

#include <cmath>
#include <cstdint>

#include "lane.h"
#include "multi_tensor_clip.h"

namespace ampfuse::math {

// The tensor lists that a step reads or writes; kernels see them as columns of a table. kMaster is
// used if the parameter is a 16-bit copy of the number that is stepped. It holds that number in
// fp32, or the 16 bits that the parameter lacks (split_float.h). kFirstMoment is the first column
// of the rule's moments. Moments in 8 bits have units in the columns from kFirstUnit on
// (coded_moment.h). kEma is an exponential average of the number that is stepped.
inline constexpr int kMostMoments = 3;
inline constexpr int kMostCodedMoments = 2;
enum StepColumn {
  kParam,
  kGrad,
  kMaster,
  kFirstMoment,
  kFirstUnit = kFirstMoment + kMostMoments,
  kEma = kFirstUnit + kMostCodedMoments,
  kMostColumns
};

constexpr bool is_moment(int column) {
  return column >= kFirstMoment && column < kFirstUnit;
}
constexpr bool is_unit(int column) {
  return column >= kFirstUnit && column < kEma;
}

template <typename Rule>
inline constexpr int kColumnsOf = kFirstMoment + Rule::kMoments;

// True if kernels have room for the moments of a rule.
template <typename Rule>
inline constexpr bool kIsRule = [] {
  for (const int count : Rule::kCounts) {
    if (count > Rule::kMoments) return false;
  }
  return Rule::kMoments <= kMostMoments;
}();

// The options that every rule has, the same for all tensors of a call.
struct StepOptions {
  bool maximize;
  bool write_back_grads;
  bool adopt_params;     // if other code wrote to a parameter, its master takes the new value
  bool round_at_random;  // 16-bit parameters without a master (stochastic_rounding.h)
  uint64_t seed;         // of random numbers
  double ema_weight;     // of the new parameters in their average: 1 - decay
};

// A rule's step of one tensor, and what its elements need besides.
template <typename Step>
struct TensorStep {
  Step of_rule = {};
  uint32_t count = 0;       // the number of this step; the first is 1
  int64_t first_index = 0;  // the first element's index among all elements of the model
};

// Returns the exponential average after a step to x, which has this weight in it. The first step
// sets it, as torch's AveragedModel does. Like torch's lerp, it starts from the nearer end.
template <typename V, typename acc_t>
AMPFUSE_HOST_DEVICE V averaged(V average, V x, acc_t weight, uint32_t count) {
  if (count == 1) return x;
  return weight <= acc_t(0.5) ? Lane<V>::multiply_add(V(weight), x - average, average)
                              : Lane<V>::multiply_add(V(1 - weight), average - x, x);
}

// One element of a parameter, or a vector register of them, with its moments.
template <typename V, int kCount>
struct StepElement {
  V param;
  V moments[kCount > 0 ? kCount : 1];
};

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
struct StepGradients {
  double norm;
  double factor;  // inverse of the loss scale, times the clip factor if gradients are clipped
};

AMPFUSE_HOST_DEVICE StepGradients step_gradients(double grad_scale, bool clip, double total_norm,
                                                 double max_norm) {
  const double unscale = 1 / grad_scale;
  const double norm = total_norm * unscale;
  return {norm, clip ? unscale * clip_factor(norm, max_norm) : unscale};
}

}  // namespace ampfuse::math
