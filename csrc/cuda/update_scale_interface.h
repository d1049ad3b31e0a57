#pragma once

#include "../math/update_scale.h"
#include "caller.h"

namespace ampfuse {

/// The most flags of one call: one per optimizer, or one per device of an optimizer.
inline constexpr int kScaleFlags = 64;

struct ScaleFlags {
  const float* flags[kScaleFlags];
  int count;
};

AMPFUSE_CUDA_API void launch_update_scale(CudaCaller& caller, const ScaleFlags& found_infs,
                                          const math::ScalePolicy& policy,
                                          const math::ScaleMemory& memory);

}  // namespace ampfuse
