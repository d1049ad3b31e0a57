// Autograd for ops that write their arguments, have no derivative and return nothing that aliases
// an argument. It serves every schema: the written arguments are those marked with (a!). The
// operators it serves are marked in ops/operators.h.
//
// torch's own fallbacks (autogradNotImplementedFallback and its in-place-or-view companion) look
// only at returned aliases. For an op that returns nothing they would not bump version counters,
// and backward would use overwritten values without an error.
#pragma once

#include <torch/library.h>

namespace ampfuse {

/// Kernel for the ADInplaceOrView key. Bumps the version counter of every written tensor. Inference
/// tensors have none; they may be written outside inference mode too, where torch's own ops throw.
torch::CppFunction mutating_version_bump();

}  // namespace ampfuse
