// Targets that are not classes, reported by kernels that have run since, for code that knows no
// CUDA.
#pragma once

#include <ampfuse/export.h>

namespace ampfuse {

/// Throws for a target out of range that a kernel on a GPU has met, once for each. Only looks at
/// memory of the host's: what is still running is reported later. Calls of cross_entropy look by
/// themselves; replays of a CUDA graph do not.
AMPFUSE_API void check_targets();

/// How to look, for the part of the library that has CUDA.
void set_target_check(void (*check)());

}  // namespace ampfuse
