#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "../capability.h"

namespace ampfuse {

// Multiplies `count` elements in place and tells whether all are finite afterwards. Writes nothing
// when the factor is 1. Real dtypes; fp32 arithmetic below double.
AMPFUSE_PER_CAPABILITY(bool scale_chunk(c10::ScalarType dtype, void* data, int64_t count,
                                        double factor))

}  // namespace ampfuse
