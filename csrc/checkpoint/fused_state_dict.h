// The states of ampfuse's optimizers as Python's state dictionaries.
#pragma once

#include <ampfuse/fused_optimizer.h>

#include "json.h"

namespace ampfuse::checkpoint::detail {

/// The dictionary shares the tensors of the optimizer. Remainders are in it as the float masters
/// that they represent, as in Python.
Dict state_dict_of(const FusedOptimizer& optimizer);

}  // namespace ampfuse::checkpoint::detail
