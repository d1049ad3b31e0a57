#include "update_scale.cuh"

#include "stream.cuh"

namespace ampfuse {

void launch_update_scale(CudaCaller& caller, const ScaleFlags& found_infs,
                         const math::ScalePolicy& policy, const math::ScaleMemory& memory) {
  LaunchStream(caller).launch(update_scale_kernel, 1, found_infs, policy, memory);
}

}  // namespace ampfuse
