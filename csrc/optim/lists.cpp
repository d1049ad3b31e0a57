#include "lists.h"

#include <ATen/ops/view_as_real.h>

#include "../ops/fused_step.h"
#include "../tensors/dtype_name.h"
#include "../tensors/float_dtypes.h"
#include "../tensors/tensor_list.h"
#include "state.h"

namespace ampfuse::optim {

namespace {

StepLists& lists_for(std::vector<StepLists>& all, at::Device device, bool has_masters) {
  for (StepLists& lists : all) {
    if (lists.device == device && lists.has_masters == has_masters) return lists;
  }
  all.push_back({device, has_masters});
  return all.back();
}

at::Tensor as_real(const at::Tensor& tensor) {
  return tensor.is_complex() ? at::view_as_real(tensor) : tensor;
}

}  // namespace

GroupLists read_group(const torch::optim::OptimizerParamGroup& group, const GroupSettings& settings,
                      StateMap& states, const OptimizerRule& rule, int64_t& first_index) {
  GroupLists read = {settings, group.options(), {}};
  for (const at::Tensor& param : group.params()) {
    const int64_t index = first_index;
    first_index = math::index_after(first_index, param.numel());
    if (!param.grad().defined()) continue;
    resolve_conjugate_grad(param);
    FusedParamState* const state = ensure_state(states, param, settings, rule);
    const bool has_master = state && state->master_param().defined();
    StepLists& lists = lists_for(read.lists, param.device(), has_master);
    lists.params.push_back(as_real(param));
    lists.grads.push_back(as_real(param.grad()));
    lists.moments.resize(settings.moments);
    lists.units.resize(settings.moments);
    const auto moments = state ? state->moments() : FusedParamState::Moments();
    for (size_t i = 0; i < settings.moments; ++i) {
      lists.moments[i].push_back(as_real(moments[i].tensor));
      if (settings.is_coded()) lists.units[i].push_back(*moments[i].units);
    }
    if (settings.counts_steps()) lists.state_steps.push_back(state->step());
    if (has_master) lists.masters.push_back(state->master_param());
    if (settings.has_ema) lists.ema_params.push_back(as_real(state->ema_param()));
    lists.first_indices.push_back(index);
  }
  return read;
}

void check_params(const torch::optim::OptimizerParamGroup& group, const GroupSettings& settings,
                  size_t group_index, const OptimizerRule& rule) {
  TORCH_CHECK_VALUE(!settings.is_coded() || settings.moments <= math::kMostCodedMoments,
                    "8-bit moments: group ", group_index,
                    " has amsgrad, whose third moment has no 8-bit form; use kBFloat16");
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
    TORCH_CHECK_VALUE(
        !settings.is_coded() || is_16bit(param.scalar_type()) || param.scalar_type() == at::kFloat,
        "8-bit moments: parameter ", index, " of group ", group_index, " is ",
        dtype_name(param.scalar_type()),
        ", and only half, bfloat16 and float parameters have them; use kFloat in a "
        "group of its own");
    const at::Tensor& grad = param.grad();
    if (!grad.defined()) continue;
    TORCH_CHECK(!grad.is_sparse(), "parameter ", index, " of group ", group_index, ": ",
                rule.name(), " does not support sparse gradients");
    TORCH_CHECK_VALUE(grad.sizes() == param.sizes(), "parameter ", index, " of group ", group_index,
                      ": expected a gradient of shape ", param.sizes(), ", got ", grad.sizes());
    TORCH_CHECK_VALUE(grad.device() == param.device(), "parameter ", index, " of group ",
                      group_index, ": expected a gradient on ", param.device(), ", got ",
                      grad.device());
  }
}

}  // namespace ampfuse::optim
