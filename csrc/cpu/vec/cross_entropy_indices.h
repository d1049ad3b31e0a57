#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "../capability.h"

namespace ampfuse {

/// The number of targets that are not ignored, and whether all of these are in range.
struct ClassIndices {
  int64_t counting;
  bool are_classes;
};

/// Counts and checks `count` targets of this dtype.
AMPFUSE_PER_CAPABILITY(ClassIndices look_at_indices(const void* indices, c10::ScalarType dtype,
                                                    int64_t count, int64_t ignore_index,
                                                    int64_t classes))

}  // namespace ampfuse
