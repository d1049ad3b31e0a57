// From a parameter group to the lists that fused_adam takes.
#pragma once

#include "adam_checked_options.h"

namespace ampfuse::optim {

using StateMap = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

/// The state of a parameter, or null before its first step.
const AdamParamState* find_state(const StateMap& states, const at::Tensor& param);

/// The state of a parameter, an empty one if there was none.
AdamParamState& state_of(StateMap& states, const at::Tensor& param);

/// What one call of the op steps: tensors on one device, all with masters or all without. Complex
/// ones are seen as pairs of numbers.
struct AdamLists {
  at::Device device;
  bool has_masters;
  std::vector<at::Tensor> params = {};
  std::vector<at::Tensor> grads = {};
  std::vector<at::Tensor> exp_avgs = {};
  std::vector<at::Tensor> exp_avg_sqs = {};
  std::vector<at::Tensor> max_exp_avg_sqs = {};
  std::vector<at::Tensor> state_steps = {};
  std::vector<at::Tensor> masters = {};
};

struct AdamGroup {
  AdamSettings settings;
  std::vector<AdamLists> lists;
};

/// The parameters of a group that have a gradient. State is made where it is missing.
AdamGroup read_group(const torch::optim::OptimizerParamGroup& group, const AdamSettings& settings,
                     StateMap& states);

/// Refuses parameters that cannot have the masters they are to have, and gradients that no step
/// can take.
void check_params(const torch::optim::OptimizerParamGroup& group, const AdamSettings& settings,
                  size_t index);

}  // namespace ampfuse::optim
