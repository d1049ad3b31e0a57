#include "fused_step_blocks.h"

namespace ampfuse::CPU_CAPABILITY {

void fused_sgd_chunk(const StepSpans& spans, int64_t count, const ChunkStep<math::SgdRule>& chunk,
                     const math::SgdStep<double>& step) {
  step_chunk(spans, count, chunk, step);
}

}  // namespace ampfuse::CPU_CAPABILITY
