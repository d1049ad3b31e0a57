#pragma once

#include <c10/core/ScalarType.h>

#include "../../math/multi_tensor_norm.h"
#include "../capability.h"

namespace ampfuse {

// Returns the norm of one chunk of at most math::kNormChunk elements.
AMPFUSE_PER_CAPABILITY(math::NormPartial norm_chunk(math::NormType type, c10::ScalarType dtype,
                                                    const void* data, int64_t count))

// Multiplies the elements in place and returns the norm of the products as stored (rounded).
AMPFUSE_PER_CAPABILITY(math::NormPartial scale_norm_chunk(math::NormType type,
                                                          c10::ScalarType dtype, void* data,
                                                          int64_t count, double factor))

}  // namespace ampfuse
