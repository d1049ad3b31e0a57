#include "fused_step_blocks.h"

namespace ampfuse::CPU_CAPABILITY {

void fused_sgd_chunk(const StepSpans& spans, int64_t count, const CallStep<math::SgdRule>& call,
                     const ChunkStep<math::SgdRule>& chunk) {
  step_chunk(spans, count, call, chunk);
}

}  // namespace ampfuse::CPU_CAPABILITY
