// Updates a loss scale, with a single thread. It runs on the device because the flags are there.
#pragma once

#include "../math/update_scale.h"
#include "launch.cuh"
#include "update_scale_interface.h"

namespace ampfuse {

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    update_scale_kernel(const __grid_constant__ ScaleFlags found_infs, math::ScalePolicy policy,
                        math::ScaleMemory memory) {
  if (threadIdx.x != 0) return;  // the grid is one block
  bool overflow = false;
  for (int i = 0; i < found_infs.count; ++i) overflow = overflow || *found_infs.flags[i] != 0;
  math::update_scale(memory, policy, overflow);
}

}  // namespace ampfuse
