// Autograd for ops that write their arguments, have no derivative and return nothing that aliases
// an argument. Generic over schemas: what is written is what the schema marks with (a!).
//
// torch's own fallbacks (autogradNotImplementedFallback and its in-place-or-view companion) look at
// returned aliases only: with an op that returns nothing version counters would not move, and
// backward would compute with overwritten values without noticing.
#pragma once

#include <torch/library.h>

namespace ampfuse {

/// For the Autograd key: refuses tensors, written or only read, that require grad while grad mode
/// is on, or that carry a forward-mode tangent, either of which would be left behind.
torch::CppFunction mutating_autograd();

/// For the ADInplaceOrView key: moves the version counter of everything written. Inference tensors
/// have none, and are written also outside of inference mode, where torch's own ops refuse.
torch::CppFunction mutating_version_bump();

}  // namespace ampfuse
