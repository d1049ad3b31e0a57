// Reports targets out of range that CUDA kernels have found, for code that is compiled without
// CUDA.
#pragma once

#include <ampfuse/export.h>

namespace ampfuse {

/// Throws if a kernel on a GPU has found a target out of range, once per report. A device keeps
/// only its latest report. This reads host memory only: a kernel that is still running reports
/// later. Calls of cross_entropy check by themselves; replays of a CUDA graph do not.
AMPFUSE_API void check_targets();

/// Sets what check_targets() calls. The callers of CUDA kernels call this.
void set_target_check(void (*check)());

}  // namespace ampfuse
