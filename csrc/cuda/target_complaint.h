// Targets that are no classes: the device says so in memory of the host's, and the next call, which
// only looks there, throws.
#pragma once

#include <c10/core/Device.h>

#include "cross_entropy_table.cuh"

namespace ampfuse {

class TargetComplaints {
 public:
  explicit TargetComplaints(c10::Device device);

  /// Throws what an earlier call complained of, once.
  void raise_earlier();

  TargetComplaint* on_device() const { return complaint_; }

  /// AMPFUSE_TARGETS=trap: a bad target stops the device at once.
  bool are_fatal() const { return are_fatal_; }

 private:
  TargetComplaint* complaint_ = nullptr;  // pinned, and never freed: a kernel may still write it
  bool are_fatal_;
};

/// Those of a device.
TargetComplaints& target_complaints(c10::Device device);

}  // namespace ampfuse
