// The history of a scaler, mostly on the device: counters, the last updates, the last steps.
#pragma once

#include <ampfuse/grad_scaler.h>

#include <array>
#include <deque>

#include "../ops/update_scale.h"
#include "../tensors/host_copy.h"
#include "gradients.h"

namespace ampfuse::amp {

/// The record of a scaler: past updates and steps, but not the scale and its growth tracker.
class ScalerHistory {
 public:
  /// Indexed by math::ScaleCounter: the hysteresis tracker (1 if the next overflow lowers the
  /// scale), the overflows in a row, and the number of updates.
  using Counts = std::array<int64_t, math::kScaleCounters>;

  ScalerHistory(const Counts& counts, int64_t history) : first_counts_(counts), length_(history) {}

  /// Returns the counters, on `device`, which is that of the scale. Creates them, and the history,
  /// on first use.
  const at::Tensor& counters(at::Device device);
  const std::optional<at::Tensor>& history() const { return history_; }

  /// Statistics of the norms, indexed by math::NormStatistic.
  using Norms = std::array<double, math::kNormStatistics>;

  /// Returns the statistics on `device`. Creates them on first use.
  const at::Tensor& norms(at::Device device);
  Norms norm_statistics() const;  // the host waits for the device
  void set_norm_statistics(const Norms& norms);

  Counts counts() const;                  // the host waits for the device
  void set_counts(const Counts& counts);  // discards the history

  /// Records a step that is about to be taken, or skipped if `found_inf` is not 0.
  void note_step(const at::Tensor& found_inf, const Inspection& inspection);

  at::Tensor step_skipped() const;
  bool was_skipped();

  /// On a GPU, returns the count of the last update whose copy has reached the host, and starts the
  /// next copy. Do not call this during a capture: each replay of the graph would copy to the host.
  int64_t consecutive_skips();

  std::vector<ScaleRecord> records() const;

  /// Sets the records of the last updates. Call this after set_counts(), which discards them.
  void put_records(std::vector<ScaleRecord> records);

  /// Returns the parameters with non-finite gradients in the last skipped step that is remembered.
  /// Parameters that were deleted since are left out.
  std::vector<at::Tensor> offenders() const;

 private:
  struct Step {
    at::Tensor found_inf;
    Inspection inspection;
  };

  at::Tensor with_first_records() const;  // a history on the CPU, with first_records_ only

  Counts first_counts_;
  std::vector<ScaleRecord> first_records_;
  int64_t length_;
  at::Tensor counters_;
  std::optional<at::Tensor> history_;
  Norms first_norms_ = {0, 0, 0, math::kNoNormLimit};
  at::Tensor norms_;
  int64_t recorded_from_ = 0;  // number of the first update in the history
  at::Tensor found_inf_;       // flag of the last step
  bool is_replayed_ = false;   // a CUDA graph captured the last step
  HostCopy counters_copy_;
  int64_t consecutive_skips_ = 0;           // as last read by the host
  std::optional<HostCopy> found_inf_copy_;  // created by the first was_skipped()
  std::deque<Step> steps_;
};

}  // namespace ampfuse::amp
