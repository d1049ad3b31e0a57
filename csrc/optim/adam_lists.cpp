#include "adam_lists.h"

#include <ATen/ops/view_as_real.h>

#include "../tensors/tensor_list.h"
#include "adam_state.h"

namespace ampfuse::optim {

namespace {

AdamLists& lists_for(std::vector<AdamLists>& all, at::Device device, bool has_masters) {
  for (AdamLists& lists : all) {
    if (lists.device == device && lists.has_masters == has_masters) return lists;
  }
  all.push_back({device, has_masters});
  return all.back();
}

at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

}  // namespace

const AdamParamState* find_state(const StateMap& states, const at::Tensor& param) {
  const auto found = states.find(param.unsafeGetTensorImpl());
  return found == states.end() ? nullptr : static_cast<const AdamParamState*>(found->second.get());
}

AdamParamState& state_of(StateMap& states, const at::Tensor& param) {
  auto& state = states[param.unsafeGetTensorImpl()];
  if (!state) state = std::make_unique<AdamParamState>();
  return static_cast<AdamParamState&>(*state);
}

AdamGroup read_group(const torch::optim::OptimizerParamGroup& group, const AdamSettings& settings,
                     StateMap& states) {
  AdamGroup read = {settings, {}};
  for (const at::Tensor& param : group.params()) {
    if (!param.grad().defined()) continue;
    resolve_conjugate_grad(param);
    AdamParamState& state = state_of(states, param);
    ensure_state(state, param, settings);
    const bool has_masters = state.master_param().defined();
    AdamLists& lists = lists_for(read.lists, param.device(), has_masters);
    lists.params.push_back(as_real(param));
    lists.grads.push_back(as_real(param.grad()));
    lists.exp_avgs.push_back(as_real(state.exp_avg()));
    lists.exp_avg_sqs.push_back(as_real(state.exp_avg_sq()));
    if (settings.amsgrad) lists.max_exp_avg_sqs.push_back(as_real(state.max_exp_avg_sq()));
    lists.state_steps.push_back(state.step());
    if (has_masters) lists.masters.push_back(state.master_param());
  }
  return read;
}

void check_params(const torch::optim::OptimizerParamGroup& group, const AdamSettings& settings,
                  size_t group_index) {
  for (size_t index = 0; index < group.params().size(); ++index) {
    const at::Tensor& param = group.params()[index];
    TORCH_CHECK_TYPE(param.defined(), "parameter ", index, " of group ", group_index,
                     ": expected a tensor, got an undefined one");
    TORCH_CHECK_VALUE(
        settings.master_weights != MasterWeights::kRemainder || param.scalar_type() != at::kHalf,
        "MasterWeights::kRemainder: parameter ", index, " of group ", group_index,
        " is float16, and only bfloat16 has a remainder; use MasterWeights::kAuto in a group of "
        "its "
        "own");
    const at::Tensor& grad = param.grad();
    if (!grad.defined()) continue;
    TORCH_CHECK(!grad.is_sparse(), "parameter ", index, " of group ", group_index,
                ": Adam does not support sparse gradients");
    TORCH_CHECK_VALUE(grad.sizes() == param.sizes(), "parameter ", index, " of group ", group_index,
                      ": expected a gradient of shape ", param.sizes(), ", got ", grad.sizes());
    TORCH_CHECK_VALUE(grad.device() == param.device(), "parameter ", index, " of group ",
                      group_index, ": expected a gradient on ", param.device(), ", got ",
                      grad.device());
  }
}

}  // namespace ampfuse::optim
