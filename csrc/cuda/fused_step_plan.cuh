// The first kernel of a fused step: it increments counters, and computes the values that all
// elements of a tensor share.
#pragma once

#include "../math/coded_moment.h"
#include "../math/fused_step.h"
#include "fused_step_interface.h"
#include "multi_tensor.cuh"

namespace ampfuse {

// How a parameter's master is stored (math::kMaster).
enum class Master { kNone, kFloat, kRemainder };

// Chunks are small, so that a warp's last chunk does not take long. The chunk size does not affect
// the bytes that a multiprocessor has in flight: 1024 threads load kPackSize elements each.
inline constexpr int kStepChunk = 2048;
static_assert(kStepChunk % math::kCodeGroup == 0, "chunks have whole groups of 8-bit moments");

// The types of columns that the kernels of extended steps (StepTypes) choose at run time. kWide is
// that of the arithmetic: float, or double.
enum class NumberType { kNone, kHalf, kBFloat16, kWide };
struct ExtendedTypes {
  NumberType grad;
  NumberType ema;  // kNone without averages
};

// A table of parameters, gradients, masters and moments, or of all columns if moments have units or
// if there are averages.
template <typename Rule>
using StepTable = TensorTable<math::kColumnsOf<Rule>, kStepChunk>;

// Step counters, which may be null, and the first element's index in place of a pointer.
using CounterTable = TensorTable<2, 1>;

template <typename Rule, typename acc_t>
struct StepPlan {
  acc_t* grad_factor;
  bool* skip;
  math::TensorStep<typename Rule::template Step<acc_t>>* steps;
};

template <typename Rule, typename acc_t>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    fused_step_prepare_kernel(const __grid_constant__ CounterTable table, int64_t first,
                              typename Rule::Options options, StepSignals signals,
                              StepPlan<Rule, acc_t> plan) {
  const float scale = signals.grad_scale == nullptr ? 1 : *signals.grad_scale;
  const bool skip = math::skips_step(signals.found_inf == nullptr ? 0 : *signals.found_inf, scale);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    const double norm = signals.clip ? signals.total_norm.get() : 0;
    const math::StepGradients gradients =
        math::step_gradients(scale, signals.clip, norm, signals.max_norm);
    *plan.grad_factor = static_cast<acc_t>(gradients.factor);
    *plan.skip = skip;
    if (signals.grad_norm != nullptr) *signals.grad_norm = static_cast<float>(gradients.norm);
  }
  if (skip) return;
  const double lr = signals.lr.get();
  for (int t = blockIdx.x * kThreads + threadIdx.x; t < table.count; t += gridDim.x * kThreads) {
    float* const counter = static_cast<float*>(table.at(0, t));
    float count = 1;  // without a counter the step does not depend on it
    if (counter != nullptr) *counter = count = *counter + 1;
    plan.steps[first + t] = {Rule::template step<acc_t>(options, lr, count),
                             static_cast<uint32_t>(count),
                             reinterpret_cast<int64_t>(table.at(1, t))};
  }
}

}  // namespace ampfuse
