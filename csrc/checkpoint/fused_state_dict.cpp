#include "fused_state_dict.h"

#include "optimizer_archive.h"

namespace ampfuse::checkpoint::detail {

namespace {

Dict state_of(FusedParamState& saved, const at::Tensor& master) {
  Dict state = new_dict();
  const auto add = [&](const std::string& name, const at::Tensor& tensor) {
    if (tensor.defined()) state.insert(name, tensor);
  };
  add("step", saved.step());
  if (saved.has_started()) {
    for (const auto& moment : saved.moments()) {
      add(moment.tensor_name(), moment.tensor);
      if (moment.has_codes()) add(moment.units_name(), *moment.units);
    }
  }
  if (saved.master_param().defined()) add("master_param", master);
  add("ema_param", saved.ema_param());
  return state;
}

}  // namespace

Dict state_dict_of(const FusedOptimizer& optimizer) {
  Dict states = new_dict();
  List groups = new_list();
  const std::vector<at::Tensor> masters = optimizer.master_params();
  int64_t number = 0;
  for (const auto& group : optimizer.param_groups()) {
    List numbers = new_list();
    for (const at::Tensor& param : group.params()) {
      const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
      if (found != optimizer.state().end()) {
        auto& state = static_cast<FusedParamState&>(*found->second);
        // Without a state torch's SGD starts its momentum.
        if (state.has_started() || state.master_param().defined()) {
          states.insert(number, state_of(state, masters[static_cast<size_t>(number)]));
        }
      }
      numbers.push_back(number++);
    }
    Dict options = options_of(group);
    options.insert("params", numbers);
    groups.push_back(options);
  }
  Dict state = new_dict();
  state.insert("state", states);
  state.insert("param_groups", groups);
  return state;
}

}  // namespace ampfuse::checkpoint::detail
