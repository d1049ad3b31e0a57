// The state of ampfuse::Adam and AdamW as Python's state dictionary.
#pragma once

#include <ampfuse/optim.h>

#include "json.h"

namespace ampfuse::checkpoint::detail {

/// The dictionary shares the tensors of the optimizer. Remainders are in it as the float masters
/// that they represent, as in Python.
Dict state_dict_of(const Adam& optimizer);

}  // namespace ampfuse::checkpoint::detail
