#pragma once

#include <c10/core/ScalarType.h>

#include "../../math/multi_tensor_norm.h"
#include "../capability.h"

namespace ampfuse {

// The norm of one chunk of at most math::kNormChunk elements.
AMPFUSE_PER_CAPABILITY(math::NormPartial norm_chunk(math::NormType type, c10::ScalarType dtype,
                                                    const void* data, int64_t count))

}  // namespace ampfuse
