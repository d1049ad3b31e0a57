#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>

#include "../../math/fused_adam.h"
#include "../capability.h"

namespace ampfuse {

/// Consecutive elements of one column (math::AdamColumn) of a tensor.
struct AdamSpan {
  void* data = nullptr;  // null if the tensor has no such column
  c10::ScalarType dtype = c10::ScalarType::Undefined;
};
using AdamSpans = std::array<AdamSpan, math::kAdamColumns>;

AMPFUSE_HOST_DEVICE AdamSpans advanced(AdamSpans spans, int64_t elements) {
  for (AdamSpan& span : spans) {
    if (span.data == nullptr) continue;
    span.data = static_cast<char*>(span.data) +
                elements * static_cast<int64_t>(c10::elementSize(span.dtype));
  }
  return spans;
}

// Takes a step for `count` elements of one tensor. Arithmetic is in double for double parameters,
// else in fp32.
AMPFUSE_PER_CAPABILITY(void fused_adam_chunk(const AdamSpans& spans, int64_t count,
                                             double grad_factor, const math::AdamOptions& options,
                                             const math::AdamStep<double>& step))

}  // namespace ampfuse
