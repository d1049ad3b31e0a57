#pragma once

#include <c10/core/ScalarType.h>

#include <array>
#include <cstdint>

#include "../../math/coded_moment.h"
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

/// `elements` must be a multiple of 32 if moments have units.
AMPFUSE_HOST_DEVICE StepSpans advanced(StepSpans spans, int64_t elements) {
  for (int column = 0; column < math::kMostColumns; ++column) {
    StepSpan& span = spans[column];
    if (span.data == nullptr) continue;
    const int64_t count = math::is_unit(column) ? elements / math::kCodeGroup : elements;
    span.data =
        static_cast<char*>(span.data) + count * static_cast<int64_t>(c10::elementSize(span.dtype));
  }
  return spans;
}

/// The arguments that all chunks of a call have in common.
template <typename Rule>
struct CallStep {
  math::StepOptions options;
  typename Rule::Options rule_options;
  int moments;  // the number of moments in use
  double grad_factor;
};

/// The step of a chunk; its index is that of the chunk's first element.
template <typename Rule>
using ChunkStep = math::TensorStep<typename Rule::template Step<double>>;

// Take a step for `count` elements of one tensor. Arithmetic is in double for double parameters,
// else in fp32.
AMPFUSE_PER_CAPABILITY(void fused_adam_chunk(const StepSpans& spans, int64_t count,
                                             const CallStep<math::AdamRule>& call,
                                             const ChunkStep<math::AdamRule>& chunk);
                       void fused_sgd_chunk(const StepSpans& spans, int64_t count,
                                            const CallStep<math::SgdRule>& call,
                                            const ChunkStep<math::SgdRule>& chunk))

}  // namespace ampfuse
