#include "fused_step_blocks.h"

namespace ampfuse::CPU_CAPABILITY {

void fused_adam_chunk(const StepSpans& spans, int64_t count, const ChunkStep<math::AdamRule>& chunk,
                      const math::AdamStep<double>& step) {
  step_chunk(spans, count, chunk, step);
}

}  // namespace ampfuse::CPU_CAPABILITY
