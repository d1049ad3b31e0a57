#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "../capability.h"

namespace ampfuse {

/// The number of targets that are not ignored, and whether all of these are in range.
struct TargetCount {
  int64_t counted;
  bool are_in_range;
};

/// Counts and checks `count` targets of this dtype.
AMPFUSE_PER_CAPABILITY(TargetCount count_targets(const void* indices, c10::ScalarType dtype,
                                                 int64_t count, int64_t ignore_index,
                                                 int64_t classes))

}  // namespace ampfuse
