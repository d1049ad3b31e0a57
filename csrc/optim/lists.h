// Converts a parameter group to the lists that an operator takes.
#pragma once

#include "state.h"

namespace ampfuse::optim {

struct GroupLists {
  GroupSettings settings;
  const torch::optim::OptimizerOptions& options;  // of the group, from which the settings are
  std::vector<StepLists> lists;
};

/// Reads the parameters of a group that have a gradient, and creates missing state. `first_index`
/// is the index of the group's first element among all elements of the model; it becomes that of
/// the next group.
GroupLists read_group(const torch::optim::OptimizerParamGroup& group, const GroupSettings& settings,
                      StateMap& states, const OptimizerRule& rule, int64_t& first_index);

/// Throws for parameters that cannot have the masters that the settings ask for, and for gradients
/// that a step cannot use.
void check_params(const torch::optim::OptimizerParamGroup& group, const GroupSettings& settings,
                  size_t group_index, const OptimizerRule& rule);

}  // namespace ampfuse::optim
