#include "fused_step_launch.cuh"

namespace ampfuse {

void launch_fused_step(CudaCaller& caller, const StepCall<math::SgdRule>& call) {
  launch_step(caller, call);
}

}  // namespace ampfuse
