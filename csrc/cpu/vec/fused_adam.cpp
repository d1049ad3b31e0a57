#include "fused_step_blocks.h"

namespace ampfuse::CPU_CAPABILITY {

void fused_adam_chunk(const StepSpans& spans, int64_t count, const CallStep<math::AdamRule>& call,
                      const ChunkStep<math::AdamRule>& chunk) {
  step_chunk(spans, count, call, chunk);
}

}  // namespace ampfuse::CPU_CAPABILITY
