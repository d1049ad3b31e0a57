// The states of torch's random number generators.
#pragma once

#include "json.h"

namespace ampfuse::checkpoint::detail {

Dict random_states();

/// GPUs that this machine does not have are left out.
void set_random_states(const Dict& states);

}  // namespace ampfuse::checkpoint::detail
