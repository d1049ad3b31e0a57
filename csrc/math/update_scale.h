// The loss scale after a training step.
//
//   overflow:    if the hysteresis tracker is above 1, lower the tracker by 1;
//                else scale ← backoff·scale
//
//   clean step:  after growth_interval clean steps in a row, scale ← growth·scale
//
// Products are rounded once, from double, as in torch. If growth would give a non-finite float, the
// scale stays as it is.
//
// A finite gradient whose norm is above a limit is an outlier, whose step is skipped, too. For the
// scale its step counts as clean. The limit comes from a running mean and variance of the norms'
// logarithms, since norms spread like a log-normal distribution.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "lane.h"

namespace ampfuse::math {

// The event that resets the hysteresis tracker to `hysteresis`: growth of the scale (Megatron-LM;
// DeepSpeed by default), or also any clean step (apex; DeepSpeed with consecutive_hysteresis).
enum class HysteresisRefill { kGrowth, kCleanStep };

struct ScalePolicy {
  double growth_factor;
  double backoff_factor;
  int64_t growth_interval;
  double min_scale;    // backoff stops here; a scale already below it stays
  double max_scale;    // growth stops here; a scale already above it stays
  int64_t hysteresis;  // the first hysteresis − 1 overflows after a reset leave the scale alone
  HysteresisRefill refill;
  bool dynamic;          // false: the scale never changes
  double skip_outliers;  // the standard deviations between the mean and the limit
};

struct ScaleState {
  float scale;
  int32_t growth_tracker;      // clean steps since the last overflow or growth
  int64_t hysteresis_tracker;  // 1 + number of overflows that will still leave the scale alone
  int64_t consecutive_skips;   // overflows in a row; a skipped outlier resets it to 0
};

AMPFUSE_HOST_DEVICE float larger_scale(float scale, const ScalePolicy& policy) {
  const auto grown = static_cast<float>(static_cast<double>(scale) * policy.growth_factor);
  if (!is_finite(grown)) return scale;
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
  // The tracker saturates: an interval above INT32_MAX is never completed.
  state.growth_tracker = grows                     ? 0
                         : clean_steps > INT32_MAX ? INT32_MAX
                                                   : static_cast<int32_t>(clean_steps);
  if (grows || policy.refill == HysteresisRefill::kCleanStep) {
    state.hysteresis_tracker = policy.hysteresis;
  }
  return state;
}

// Indices in `counters`: the hysteresis tracker, consecutive skips, and updates so far.
enum ScaleCounter { kHysteresisTracker, kConsecutiveSkips, kUpdates, kScaleCounters };

// Indices in `norms`: the number of norms so far, the mean and the variance of their logarithms,
// and the limit above which the next norm is an outlier.
enum NormStatistic { kNorms, kMeanOfLogs, kVarianceOfLogs, kNormLimit, kNormStatistics };

inline constexpr double kNoNormLimit = std::numeric_limits<double>::infinity();
inline constexpr double kNormWindow = 128;  // a new norm weighs at least 1 / kNormWindow
inline constexpr double kFirstNorms = 64;   // until so many were seen there is no limit
// Lower bound on the standard deviation, so that if all norms are nearly equal, one that is 10 %
// larger is not an outlier.
inline constexpr double kLeastDeviation = 0.1;

AMPFUSE_HOST_DEVICE bool is_outlier(const double* norms, float norm) {
  return norm > norms[kNormLimit];
}

// Adds a norm. A norm above the limit counts as the limit, so a single outlier hardly changes the
// statistics. If all later norms are as large, the variance grows until they are no longer
// outliers, because the limit is more than one standard deviation above the mean.
AMPFUSE_HOST_DEVICE void update_norms(double* norms, float norm, double skip_outliers) {
  if (!(norm > 0) || !is_finite(norm)) return;
  const double limit = norms[kNormLimit];
  norms[kNorms] += 1;
  const double weight = 1 / (norms[kNorms] < kNormWindow ? norms[kNorms] : kNormWindow);
  const double difference = std::log(norm < limit ? norm : limit) - norms[kMeanOfLogs];
  norms[kMeanOfLogs] += weight * difference;
  norms[kVarianceOfLogs] =
      (1 - weight) * (norms[kVarianceOfLogs] + weight * difference * difference);
  const double deviation = std::sqrt(norms[kVarianceOfLogs]);
  const double above = skip_outliers * (deviation > kLeastDeviation ? deviation : kLeastDeviation);
  norms[kNormLimit] =
      norms[kNorms] < kFirstNorms ? kNoNormLimit : std::exp(norms[kMeanOfLogs] + above);
}

// Floats per step in the history: the scale; 1 after an overflow, 2 for a skipped outlier, else 0;
// and the norm of the gradients, or NaN if it is unknown.
inline constexpr int kScaleRecord = 3;

// Pointers to the tensors that hold a scale and its counters.
struct ScaleMemory {
  float* scale;
  int32_t* growth_tracker;
  int64_t* counters;
  float* history;  // or null
  int64_t history_rows;
  const float* norm;  // or null
  double* norms;      // or null: no step is an outlier
};

AMPFUSE_HOST_DEVICE void update_scale(const ScaleMemory& memory, const ScalePolicy& policy,
                                      bool overflow) {
  int64_t* const counters = memory.counters;
  const bool skips_outlier = memory.norms != nullptr && is_outlier(memory.norms, *memory.norm);
  if (memory.norms != nullptr) update_norms(memory.norms, *memory.norm, policy.skip_outliers);
  if (memory.history != nullptr) {
    // Unsigned: the row stays inside the history whatever the counter holds.
    const auto row =
        static_cast<uint64_t>(counters[kUpdates]) % static_cast<uint64_t>(memory.history_rows);
    float* const record = memory.history + row * kScaleRecord;
    record[0] = *memory.scale;
    record[1] = overflow ? 1.0f : skips_outlier ? 2.0f : 0.0f;
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
