// The part of an optimizer in a checkpoint, in the form of Python's state dictionaries.
#pragma once

#include <torch/optim/optimizer.h>

#include "encoding.h"
#include "index.h"
#include "mistakes.h"

namespace ampfuse::checkpoint::detail {

Dict part_of(torch::optim::Optimizer& optimizer);

void check_part(const torch::optim::Optimizer& optimizer, const at::IValue& part,
                const Index& index, Mistakes& mistakes);

/// Hands the state to the optimizer's load(), which may refuse it.
void load_part(torch::optim::Optimizer& optimizer, const Dict& part);

}  // namespace ampfuse::checkpoint::detail
