// Converts a parameter group to the lists that fused_adam takes.
#pragma once

#include "adam_options.h"

namespace ampfuse::optim {

using StateMap = ska::flat_hash_map<void*, std::unique_ptr<torch::optim::OptimizerParamState>>;

/// Returns the state of a parameter, or null before its first step.
const AdamParamState* find_state(const StateMap& states, const at::Tensor& param);

/// Returns the state of a parameter, and creates an empty one if it is missing.
AdamParamState& state_of(StateMap& states, const at::Tensor& param);

/// The tensors that one call of the op steps: on one device, all with masters or all without.
/// Complex tensors are viewed as pairs of real numbers.
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

/// Reads the parameters of a group that have a gradient, and creates missing state.
AdamGroup read_group(const torch::optim::OptimizerParamGroup& group, const AdamSettings& settings,
                     StateMap& states);

/// Throws for parameters that cannot have the masters that the settings ask for, and for gradients
/// that a step cannot use.
void check_params(const torch::optim::OptimizerParamGroup& group, const AdamSettings& settings,
                  size_t group_index);

}  // namespace ampfuse::optim
