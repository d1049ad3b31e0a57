// What a scaler remembers on the device: counters, the last updates, the last steps.
#pragma once

#include <ampfuse/grad_scaler.h>

#include <array>
#include <deque>

#include "../ops/update_scale.h"
#include "../tensors/host_copy.h"
#include "gradients.h"

namespace ampfuse::amp {

/// Everything but the scale and its growth tracker.
class ScaleMemory {
 public:
  /// Which overflow from here on backs off, skips in a row, updates.
  using Counts = std::array<int64_t, math::kScaleCounters>;

  ScaleMemory(const Counts& counts, int64_t history) : first_counts_(counts), length_(history) {}

  /// On the device of the scale, made where they are first needed.
  const at::Tensor& counters(at::Device device);
  const std::optional<at::Tensor>& history() const { return history_; }

  Counts counts() const;                  // the host waits for them
  void set_counts(const Counts& counts);  // the history begins anew

  /// A step is about to be taken, unless the flag says otherwise.
  void note_step(const at::Tensor& found_inf, const Inspection& inspection);

  at::Tensor step_skipped() const;
  bool was_skipped();

  /// As of the last update of which the host has heard. It does not ask while a CUDA graph is
  /// captured, nor does any replay.
  int64_t skips_in_a_row();

  std::vector<ScaleRecord> records() const;

  /// Parameters whose gradients were not finite in the last skipped step that is known.
  std::vector<at::Tensor> offenders() const;

 private:
  struct Step {
    at::Tensor found_inf;
    Inspection inspection;
  };

  Counts first_counts_;
  int64_t length_;
  at::Tensor counters_;
  std::optional<at::Tensor> history_;
  int64_t recorded_from_ = 0;  // the first update of which it knows
  at::Tensor found_inf_;       // of the last step
  bool is_replayed_ = false;   // that step, by a CUDA graph
  HostCopy counters_copy_;
  int64_t skips_in_a_row_ = 0;              // that the host knows of
  std::optional<HostCopy> found_inf_copy_;  // once somebody has asked
  std::deque<Step> steps_;
};

}  // namespace ampfuse::amp
