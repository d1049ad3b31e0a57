#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>

#include "../../math/fused_adam.h"
#include "../../math/fused_sgd.h"
#include "../capability.h"

namespace ampfuse {

/// Consecutive elements of one column (math::StepColumn) of a tensor.
struct StepSpan {
  void* data = nullptr;  // null if the tensor has no such column
  c10::ScalarType dtype = c10::ScalarType::Undefined;
};
using StepSpans = std::array<StepSpan, math::kMostColumns>;

AMPFUSE_HOST_DEVICE StepSpans advanced(StepSpans spans, int64_t elements) {
  for (StepSpan& span : spans) {
    if (span.data == nullptr) continue;
    span.data = static_cast<char*>(span.data) +
                elements * static_cast<int64_t>(c10::elementSize(span.dtype));
  }
  return spans;
}

/// The arguments of a chunk besides its elements.
template <typename Rule>
struct ChunkStep {
  math::StepOptions options;
  typename Rule::Options rule_options;
  int moments;  // the number of moments in use
  double grad_factor;
};

// Take a step for `count` elements of one tensor. Arithmetic is in double for double parameters,
// else in fp32.
AMPFUSE_PER_CAPABILITY(void fused_adam_chunk(const StepSpans& spans, int64_t count,
                                             const ChunkStep<math::AdamRule>& chunk,
                                             const math::AdamStep<double>& step);
                       void fused_sgd_chunk(const StepSpans& spans, int64_t count,
                                            const ChunkStep<math::SgdRule>& chunk,
                                            const math::SgdStep<double>& step))

}  // namespace ampfuse
