#pragma once

#include <c10/core/ScalarType.h>

#include "../../math/multi_tensor_norm.h"
#include "../capability.h"

namespace ampfuse {

// The norm of one chunk of at most math::kNormChunk elements.
AMPFUSE_PER_CAPABILITY(math::NormPartial norm_chunk(math::NormType type, c10::ScalarType dtype,
                                                    const void* data, int64_t count))

// Multiplies the elements in place, and tells the norm of the products, rounded as they are stored.
AMPFUSE_PER_CAPABILITY(math::NormPartial scale_norm_chunk(math::NormType type,
                                                          c10::ScalarType dtype, void* data,
                                                          int64_t count, double factor))

}  // namespace ampfuse
