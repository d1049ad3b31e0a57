#pragma once

#include <c10/core/ScalarType.h>

#include <cstdint>

#include "../capability.h"

namespace ampfuse {

// Multiplies `count` elements of a real dtype in place, and returns true if all are finite
// afterwards. Writes nothing if the factor is 1. Arithmetic is in double for double, else in fp32.
AMPFUSE_PER_CAPABILITY(bool scale_chunk(c10::ScalarType dtype, void* data, int64_t count,
                                        double factor))

}  // namespace ampfuse
