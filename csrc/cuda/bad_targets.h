// Reports of targets out of range. A kernel writes the report to host memory, and a later call
// throws. Reading the report does not synchronise with the device, so the next call may come first.
#pragma once

#include <mutex>

#include "cross_entropy_interface.h"

namespace ampfuse {

class BadTargets {
 public:
  explicit BadTargets(CudaCaller& caller);

  /// Throws if an earlier call has reported a bad target; only one host thread throws for a report.
  void raise_earlier();

  /// Lets the kernels of a call report a bad target. With AMPFUSE_TARGETS=trap it stops the device
  /// at once.
  void report_for(LogitRows& rows) const;

 private:
  std::mutex mutex_;
  BadTarget* bad_target_;
  bool trap_;
};

/// Returns the reports of the caller's device.
BadTargets& bad_targets_of(CudaCaller& caller);

}  // namespace ampfuse
