// The functions that csrc/cuda/early_start.cuh defines for GPUs. Here a launch begins when the one
// before it has ended.
#pragma once

namespace ampfuse {

inline void let_next_kernel_start() {}
inline void wait_for_kernel_before() {}

}  // namespace ampfuse
