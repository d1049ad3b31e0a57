// Targets that are no classes: the device says so in memory of the host's, and the next call, which
// only looks there, throws.
#pragma once

#include <c10/core/Device.h>

#include "cross_entropy_table.cuh"

namespace ampfuse {

class BadTargets {
 public:
  explicit BadTargets(c10::Device device);

  /// Throws what an earlier call complained of, once.
  void raise_earlier();

  BadTarget* on_device() const { return bad_target_; }

  /// AMPFUSE_TARGETS=trap: a bad target stops the device at once.
  bool are_fatal() const { return are_fatal_; }

 private:
  BadTarget* bad_target_ = nullptr;  // pinned, and never freed: a kernel may still write it
  bool are_fatal_;
};

/// The bad targets of a device.
BadTargets& bad_targets_of(c10::Device device);

}  // namespace ampfuse
