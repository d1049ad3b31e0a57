// Reports of targets out of range. A kernel writes the report to host memory, and a later call
// throws. Reading the report does not synchronise with the device, so the next call may come first.
#pragma once

#include <c10/core/Device.h>

#include <mutex>

#include "cross_entropy_table.cuh"

namespace ampfuse {

class BadTargets {
 public:
  explicit BadTargets(c10::Device device);

  /// Throws if an earlier call has reported a bad target; only one host thread throws for a report.
  void raise_earlier();

  BadTarget* on_device() const { return bad_target_; }

  /// True with AMPFUSE_TARGETS=trap: a bad target then stops the device at once.
  bool trap() const { return trap_; }

 private:
  std::mutex mutex_;
  BadTarget* bad_target_ = nullptr;  // pinned; never freed, since a kernel may still write to it
  bool trap_;
};

/// Returns the reports of a device.
BadTargets& bad_targets_of(c10::Device device);

}  // namespace ampfuse
