// The loss scale after a training step.
//
//   overflow:  forgiven while the tracker is above 1, which counts it down;
//              else scale ← backoff·scale
//
//   clean:     after growth_interval of them in a row scale ← growth·scale
//
// Products are rounded once, from double, as torch's are, and a product that is no finite float is
// not taken.
#pragma once

#include <cstdint>

#include "host_device.h"

namespace ampfuse::math {

// What makes overflows be forgiven again: growth of the scale (Megatron-LM; DeepSpeed unless told
// otherwise), or any clean step (apex; DeepSpeed's consecutive_hysteresis).
enum class HysteresisRefill { kGrowth, kCleanStep };

struct ScalePolicy {
  double growth_factor;
  double backoff_factor;
  int64_t growth_interval;
  double min_scale;    // backing off ends here; a scale that is below already stays
  double max_scale;    // growing ends here; likewise
  int64_t hysteresis;  // the overflow in this place of a row is the first to cost: 1 forgives none
  HysteresisRefill refill;
  bool dynamic;  // else the scale stays what it is
};

struct ScaleState {
  float scale;
  int32_t growth_tracker;      // clean steps since the last overflow or growth
  int64_t hysteresis_tracker;  // which overflow from here on is the first to cost: at least 1
  int64_t consecutive_skips;
};

AMPFUSE_HOST_DEVICE float larger_scale(float scale, const ScalePolicy& policy) {
  const auto grown = static_cast<float>(static_cast<double>(scale) * policy.growth_factor);
  if (!(grown - grown == 0)) return scale;
  const auto limit = static_cast<float>(policy.max_scale);
  return grown <= limit ? grown : scale < limit ? limit : scale;
}

AMPFUSE_HOST_DEVICE float smaller_scale(float scale, const ScalePolicy& policy) {
  const auto smaller = static_cast<float>(static_cast<double>(scale) * policy.backoff_factor);
  const auto limit = static_cast<float>(policy.min_scale);
  return smaller >= limit ? smaller : scale > limit ? limit : scale;
}

AMPFUSE_HOST_DEVICE ScaleState update_scale(ScaleState state, const ScalePolicy& policy,
                                            bool overflow) {
  state.consecutive_skips = overflow ? state.consecutive_skips + 1 : 0;
  if (!policy.dynamic) return state;
  if (overflow) {
    state.growth_tracker = 0;
    if (state.hysteresis_tracker > 1) {
      state.hysteresis_tracker -= 1;
    } else {
      state.scale = smaller_scale(state.scale, policy);
    }
    return state;
  }
  const int64_t clean_steps = static_cast<int64_t>(state.growth_tracker) + 1;
  const bool grows = clean_steps >= policy.growth_interval;
  if (grows) state.scale = larger_scale(state.scale, policy);
  // An interval beyond the tracker's range is one that never ends.
  state.growth_tracker = grows                     ? 0
                         : clean_steps > INT32_MAX ? INT32_MAX
                                                   : static_cast<int32_t>(clean_steps);
  if (grows || policy.refill == HysteresisRefill::kCleanStep) {
    state.hysteresis_tracker = policy.hysteresis;
  }
  return state;
}

// Where `counters` has what: the tracker, skips in a row, updates so far.
enum ScaleCounter { kHysteresisTracker, kConsecutiveSkips, kUpdates, kScaleCounters };

// A step's record in the history: the scale it was taken with, whether it was skipped, and the norm
// of its gradients, NaN if nobody knows it.
inline constexpr int kScaleRecord = 3;

// A scale where tensors keep it.
struct ScaleMemory {
  float* scale;
  int32_t* growth_tracker;
  int64_t* counters;
  float* history;  // or null
  int64_t history_rows;
  const float* norm;  // or null
};

AMPFUSE_HOST_DEVICE void update_scale(const ScaleMemory& memory, const ScalePolicy& policy,
                                      bool overflow) {
  int64_t* const counters = memory.counters;
  if (memory.history != nullptr) {
    // Unsigned, so that no number of updates leads out of the history.
    const auto row =
        static_cast<uint64_t>(counters[kUpdates]) % static_cast<uint64_t>(memory.history_rows);
    float* const record = memory.history + row * kScaleRecord;
    record[0] = *memory.scale;
    record[1] = overflow ? 1.0f : 0.0f;
    record[2] = memory.norm != nullptr ? *memory.norm : __builtin_nanf("");
  }
  const ScaleState state =
      update_scale(ScaleState{*memory.scale, *memory.growth_tracker, counters[kHysteresisTracker],
                              counters[kConsecutiveSkips]},
                   policy, overflow);
  *memory.scale = state.scale;
  *memory.growth_tracker = state.growth_tracker;
  counters[kHysteresisTracker] = state.hysteresis_tracker;
  counters[kConsecutiveSkips] = state.consecutive_skips;
  counters[kUpdates] = static_cast<int64_t>(static_cast<uint64_t>(counters[kUpdates]) + 1);
}

}  // namespace ampfuse::math
