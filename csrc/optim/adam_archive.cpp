// The layout is that of torch::optim::AdamW: "state" by key, and "param_groups" with each group's
// keys and options. torch's keys are addresses; ours count the parameters, so that the same state
// gives the same archive, and keys are those of Python's state dictionaries.
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/GradMode.h>
#include <torch/serialize/archive.h>

#include "adam_columns.h"
#include "adam_state.h"

namespace ampfuse {

namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

struct SavedGroup {
  InputArchive options;
  optim::AdamSettings settings;
  std::vector<std::optional<AdamParamState>> states;  // of its parameters
};

void write_size(OutputArchive& archive, const char* key, size_t size) {
  archive.write(key, at::scalar_tensor(static_cast<int64_t>(size), at::kLong));
}

size_t read_size(InputArchive& archive, const char* key) {
  at::Tensor size;
  archive.read(key, size);
  return static_cast<size_t>(size.item<int64_t>());
}

void check_shapes(const AdamParamState& state, const at::Tensor& param, size_t place,
                  size_t group) {
  const auto check = [&](const char* name, const at::Tensor& tensor) {
    TORCH_CHECK_VALUE(!tensor.defined() || tensor.sizes() == param.sizes(),
                      "loaded state dict: ", name, " of parameter ", place, " of group ", group,
                      ": expected shape ", param.sizes(), ", got ", tensor.sizes());
  };
  TORCH_CHECK_VALUE(state.exp_avg().defined() && state.exp_avg_sq().defined(),
                    "loaded state dict: parameter ", place, " of group ", group,
                    " has no exp_avg or no exp_avg_sq");
  check("exp_avg", state.exp_avg());
  check("exp_avg_sq", state.exp_avg_sq());
  check("max_exp_avg_sq", state.max_exp_avg_sq());
  check("master_param", state.master_param());
}

SavedGroup read_saved_group(InputArchive& archive, InputArchive& states,
                            const torch::optim::OptimizerParamGroup& group, size_t index) {
  const std::vector<at::Tensor>& params = group.params();
  TORCH_CHECK_VALUE(read_size(archive, "params/size") == params.size(),
                    "loaded state dict contains a parameter group that has a different size than "
                    "the optimizer's parameter group");
  SavedGroup saved;
  archive.read("options", saved.options);
  const auto options = group.options().clone();
  options->serialize(saved.options);
  saved.settings = optim::checked_settings(*options, index);
  for (size_t place = 0; place < params.size(); ++place) {
    torch::IValue key;
    archive.read("params/" + std::to_string(place), key);
    InputArchive state;
    saved.states.emplace_back();
    if (!states.try_read(key.toStringRef(), state)) continue;
    saved.states.back().emplace().serialize(state);
    check_shapes(*saved.states.back(), params[place], place, index);
  }
  return saved;
}

AdamParamState with_whole_master(AdamParamState state, const at::Tensor& param) {
  if (state.master_param().defined()) {
    state.master_param(optim::whole_master(param, state.master_param()));
  }
  return state;
}

}  // namespace

void Adam::save(OutputArchive& archive) const {
  const c10::NoGradGuard no_grad;
  OutputArchive states(archive.compilation_unit());
  OutputArchive groups(archive.compilation_unit());
  write_size(groups, "param_groups/size", param_groups_.size());
  size_t params = 0;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    OutputArchive group(archive.compilation_unit());
    write_size(group, "params/size", param_groups_[i].params().size());
    for (size_t place = 0; place < param_groups_[i].params().size(); ++place) {
      const std::string key = std::to_string(params++);
      group.write("params/" + std::to_string(place), torch::IValue(key));
      const at::Tensor& param = param_groups_[i].params()[place];
      const auto* of_param = optim::find_state(state_, param);
      if (!of_param) continue;
      OutputArchive state(archive.compilation_unit());
      with_whole_master(*of_param, param).serialize(state);
      states.write(key, state);
    }
    OutputArchive options(archive.compilation_unit());
    param_groups_[i].options().serialize(options);
    group.write("options", options);
    groups.write("param_groups/" + std::to_string(i), group);
  }
  archive.write("pytorch_version", torch::IValue("1.5.0"));  // of the layout; torch asks for it
  archive.write("state", states);
  archive.write("param_groups", groups);
}

void Adam::load(InputArchive& archive) {
  const c10::NoGradGuard no_grad;
  InputArchive states;
  InputArchive groups;
  archive.read("state", states);
  archive.read("param_groups", groups);
  TORCH_CHECK_VALUE(read_size(groups, "param_groups/size") == param_groups_.size(),
                    "loaded state dict has a different number of parameter groups");
  std::vector<SavedGroup> saved;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    InputArchive group;
    groups.read("param_groups/" + std::to_string(i), group);
    saved.push_back(read_saved_group(group, states, param_groups_[i], i));
  }
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    param_groups_[i].options().serialize(saved[i].options);
    for (size_t place = 0; place < saved[i].states.size(); ++place) {
      const at::Tensor& param = param_groups_[i].params()[place];
      if (saved[i].states[place]) {
        optim::load_state(optim::state_of(state_, param), *saved[i].states[place], param,
                          saved[i].settings);
      } else {
        state_.erase(param.unsafeGetTensorImpl());
      }
    }
  }
  versions_after_step_.reset();
}

}  // namespace ampfuse
