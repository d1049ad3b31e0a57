// The states of optimizers as state dictionaries, by way of the archives that they write and read.
//
// An archive of torch holds numbers where Python's state dictionary has tensors: the entry `step`.
// It names parameters by their addresses, Python by consecutive numbers.
#pragma once

#include <torch/optim/optimizer.h>

#include "json.h"

namespace ampfuse::checkpoint::detail {

/// Returns the options of a group by their names in archives.
Dict options_of(const torch::optim::OptimizerParamGroup& group);

/// Throws Error if the optimizer's save() does not write what the optimizers of torch write.
Dict state_dict_of(torch::optim::Optimizer& optimizer);

/// Hands a state dictionary to the optimizer's load(). `class_name`: the class that has saved it.
void load_state_dict(torch::optim::Optimizer& optimizer, const Dict& state,
                     const std::string& class_name);

}  // namespace ampfuse::checkpoint::detail
