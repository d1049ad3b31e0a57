// The part of a scaler in a checkpoint: its state and its history.
#pragma once

#include <ampfuse/grad_scaler.h>

#include "mistakes.h"

namespace ampfuse::checkpoint::detail {

Dict part_of(const GradScaler& scaler);

void check_part(const GradScaler& scaler, const at::IValue& part, Mistakes& mistakes);

/// Hands the state to the scaler's load_state_dict(), which may refuse it.
void load_part(GradScaler& scaler, const Dict& part);

}  // namespace ampfuse::checkpoint::detail
