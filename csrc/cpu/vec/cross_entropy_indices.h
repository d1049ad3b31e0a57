#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "../capability.h"

namespace ampfuse {

/// What rows' targets tell: how many there are but for ignored ones, and whether all of those are
/// classes.
struct ClassIndices {
  int64_t counting;
  bool are_classes;
};

/// Of indices of this dtype.
AMPFUSE_PER_CAPABILITY(ClassIndices look_at_indices(const void* indices, c10::ScalarType dtype,
                                                    int64_t count, int64_t ignore_index,
                                                    int64_t classes))

}  // namespace ampfuse
