#include "adam_state_dict.h"

namespace ampfuse::checkpoint::detail {

namespace {

template <typename Options>
Dict dict_of(const Options& options) {
  Dict group = new_dict();
  group.insert("lr", options.lr());
  const auto [beta1, beta2] = options.betas();
  group.insert("betas", c10::ivalue::Tuple::create({beta1, beta2}));
  group.insert("eps", options.eps());
  group.insert("weight_decay", options.weight_decay());
  group.insert("amsgrad", options.amsgrad());
  group.insert("maximize", options.maximize());
  group.insert("decoupled_weight_decay", std::is_same_v<Options, AdamWOptions>);
  group.insert("max_grad_norm", at::IValue(options.max_grad_norm()));
  group.insert("write_back_grads", options.write_back_grads());
  return group;
}

Dict group_of(const torch::optim::OptimizerOptions& options) {
  const auto* adamw = dynamic_cast<const AdamWOptions*>(&options);
  return adamw ? dict_of(*adamw) : dict_of(dynamic_cast<const AdamOptions&>(options));
}

Dict state_of(const AdamParamState& saved, const at::Tensor& master) {
  Dict state = new_dict();
  const auto add = [&](const char* name, const at::Tensor& tensor) {
    if (tensor.defined()) state.insert(name, tensor);
  };
  add("step", saved.step());
  add("exp_avg", saved.exp_avg());
  add("exp_avg_sq", saved.exp_avg_sq());
  add("max_exp_avg_sq", saved.max_exp_avg_sq());
  if (saved.master_param().defined()) add("master_param", master);
  return state;
}

}  // namespace

Dict state_dict_of(const Adam& optimizer) {
  Dict states = new_dict();
  List groups = new_list();
  const std::vector<at::Tensor> masters = optimizer.master_params();
  int64_t number = 0;
  for (const auto& group : optimizer.param_groups()) {
    List numbers = new_list();
    for (const at::Tensor& param : group.params()) {
      const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
      if (found != optimizer.state().end()) {
        const auto& state = static_cast<const AdamParamState&>(*found->second);
        states.insert(number, state_of(state, masters[static_cast<size_t>(number)]));
      }
      numbers.push_back(number++);
    }
    Dict options = group_of(group.options());
    options.insert("params", numbers);
    groups.push_back(options);
  }
  Dict state = new_dict();
  state.insert("state", states);
  state.insert("param_groups", groups);
  return state;
}

}  // namespace ampfuse::checkpoint::detail
