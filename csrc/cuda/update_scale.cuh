// One update of a loss scale: a matter for one thread, but on the device, where the flags are.
#pragma once

#include "../math/update_scale.h"
#include "launch.cuh"

namespace ampfuse {

inline constexpr int kScaleFlags = 64;  // as many optimizers, or devices of theirs

struct ScaleFlags {
  const float* flags[kScaleFlags];
  int count;
};

__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    update_scale_kernel(const __grid_constant__ ScaleFlags found_infs, math::ScalePolicy policy,
                        math::ScaleMemory memory) {
  if (blockIdx.x != 0 || threadIdx.x != 0) return;
  bool overflow = false;
  for (int i = 0; i < found_infs.count; ++i) overflow = overflow || *found_infs.flags[i] != 0;
  math::update_scale(memory, policy, overflow);
}

}  // namespace ampfuse
