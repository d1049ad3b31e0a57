// The layout of an archive is that of torch's optimizers: "state" by key, and "param_groups" with
// each group's keys and options. torch's keys are addresses. Ours are consecutive numbers, as in
// Python's state dictionaries, so that the same state gives the same archive.
#include <ATen/ops/scalar_tensor.h>
#include <c10/core/GradMode.h>
#include <torch/serialize/archive.h>

#include <algorithm>

#include "../ops/fused_step.h"
#include "../tensors/dtype_name.h"
#include "../tensors/float_dtypes.h"
#include "../tensors/tensor_list.h"
#include "state.h"

namespace ampfuse {

namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

struct SavedGroup {
  InputArchive options;                                // already read once, and valid
  std::vector<std::optional<optim::NewState>> states;  // one per parameter
};

void write_size(OutputArchive& archive, const char* key, size_t size) {
  archive.write(key, at::scalar_tensor(static_cast<int64_t>(size), at::kLong));
}

size_t read_size(InputArchive& archive, const char* key) {
  at::Tensor size;
  archive.read(key, size);
  return static_cast<size_t>(size.item<int64_t>());
}

// Names a parameter in messages.
struct ParamIndex {
  size_t param;
  size_t group;
};

std::ostream& operator<<(std::ostream& out, const ParamIndex& index) {
  return out << "parameter " << index.param << " of group " << index.group;
}

void check_fits(const char* name, const at::Tensor& tensor, const at::Tensor& param,
                const ParamIndex& index) {
  const auto check = [&](bool fits, const auto&... expected) {
    TORCH_CHECK_VALUE(fits, "loaded state dict: ", name, " of ", index, ": expected ", expected...);
  };
  if (!tensor.defined()) return;
  check(tensor.layout() == at::kStrided && !tensor.is_quantized(), "a dense tensor, got ",
        tensor.toString());
  check(tensor.sizes() == param.sizes(), "shape ", param.sizes(), ", got ", tensor.sizes());
  check(tensor.is_floating_point() || tensor.is_complex(), "a floating-point tensor, got ",
        dtype_name(tensor.scalar_type()));
  check(tensor.is_complex() == param.is_complex(), "a tensor for ", dtype_name(param.scalar_type()),
        ", got ", dtype_name(tensor.scalar_type()));
  check(has_memory(tensor) && !tensor.is_meta(), "a tensor with memory, got none");
}

void check_codes(const FusedParamState::Moment& moment, at::ScalarType dtype,
                 const at::Tensor& param, const ParamIndex& index) {
  const at::Tensor& codes = moment.tensor;
  const at::Tensor& units = *moment.units;
  const int64_t groups = number_of_units(param.numel());
  TORCH_CHECK_VALUE(codes.defined() && codes.sizes() == param.sizes() && has_memory(codes) &&
                        codes.scalar_type() == dtype,
                    "loaded state dict: ", moment.tensor_name(), " of ", index, ": expected ",
                    dtype_name(dtype), " of shape ", param.sizes());
  TORCH_CHECK_VALUE(units.dim() == 1 && units.size(0) == groups && has_memory(units) &&
                        units.scalar_type() == at::kBFloat16,
                    "loaded state dict: ", moment.units_name(), " of ", index, ": expected ",
                    groups, " bfloat16, got ", dtype_name(units.scalar_type()), " of shape ",
                    units.sizes());
}

void check_state(FusedParamState& state, const at::Tensor& param, const ParamIndex& index,
                 const OptimizerRule& rule) {
  rule.check_archived(state, c10::str(index));
  const auto moments = state.moments();
  for (size_t i = 0; i < moments.size(); ++i) {
    if (moments[i].has_codes()) {
      check_codes(moments[i], i == 0 ? at::kChar : at::kByte, param, index);
    } else {
      check_fits(moments[i].name, moments[i].tensor, param, index);
    }
  }
  check_fits("master_param", state.master_param(), param, index);
  check_fits("ema_param", state.ema_param(), param, index);
  const at::Tensor& step = state.step();
  TORCH_CHECK_VALUE(step.layout() == at::kStrided && step.numel() == 1 && !step.is_complex() &&
                        has_memory(step) && !step.is_meta(),
                    "loaded state dict: step of ", index, ": expected one real number, got ",
                    dtype_name(step.scalar_type()), " of shape ", step.sizes());
}

SavedGroup read_saved_group(InputArchive& archive, InputArchive& states,
                            const torch::optim::OptimizerParamGroup& group, size_t group_index,
                            const OptimizerRule& rule) {
  const std::vector<at::Tensor>& params = group.params();
  TORCH_CHECK_VALUE(read_size(archive, "params/size") == params.size(),
                    "loaded state dict contains a parameter group that has a different size than "
                    "the optimizer's parameter group");
  SavedGroup saved;
  archive.read("options", saved.options);
  rule.check_archive(saved.options);
  const auto options = group.options().clone();
  options->serialize(saved.options);
  const optim::GroupSettings settings = rule.checked_settings(*options, group_index);
  for (size_t index = 0; index < params.size(); ++index) {
    torch::IValue key;
    archive.read("params/" + std::to_string(index), key);
    InputArchive archived;
    saved.states.emplace_back();
    if (!states.try_read(key.toStringRef(), archived)) continue;
    const auto state = rule.new_state();
    state->serialize(archived);
    check_state(*state, params[index], {index, group_index}, rule);
    saved.states.back() = optim::new_state(*state, params[index], settings, rule);
  }
  return saved;
}

// Throws if loading would write masters to each other's parameters. States belong to parameters by
// their order: an optimizer that is made with another order would move the weights of a model that
// was loaded before.
void refuse_other_order(const std::vector<torch::optim::OptimizerParamGroup>& groups,
                        const std::vector<SavedGroup>& saved) {
  struct Loaded {
    ParamIndex index;
    at::Tensor param;
    at::Tensor master;
    at::Tensor value() const { return master.to(param.device(), param.scalar_type()); }
  };
  std::vector<Loaded> loaded;
  for (size_t i = 0; i < groups.size(); ++i) {
    for (size_t j = 0; j < saved[i].states.size(); ++j) {
      const at::Tensor& param = groups[i].params()[j];
      const auto& state = saved[i].states[j];
      if (state && state->param.defined() && has_memory(param) && !param.is_meta()) {
        loaded.push_back({{j, i}, param, state->param});
      }
    }
  }
  const auto are_same = [](const at::Tensor& a, const at::Tensor& b) {
    return a.sizes() == b.sizes() && a.scalar_type() == b.scalar_type() &&
           a.device() == b.device() && a.equal(b);
  };
  for (const Loaded& one : loaded) {
    const at::Tensor value = one.value();
    if (value.equal(one.param) || value.numel() == 0) continue;
    // Norms and biases may be constant, and alike.
    if (value.eq(value.flatten()[0]).all().item<bool>()) continue;
    const auto goes_to = std::ranges::find_if(
        loaded, [&](const Loaded& other) { return are_same(other.param, value); });
    if (goes_to == loaded.end()) return;  // the model was not loaded before: nothing is known
    const auto comes_from = std::ranges::find_if(loaded, [&](const Loaded& other) {
      return other.param.sizes() == one.param.sizes() && are_same(other.value(), one.param);
    });
    TORCH_CHECK_VALUE(comes_from == loaded.end(), "loaded state dict: the master of ", one.index,
                      " is the value of ", goes_to->index, ", and that of ", comes_from->index,
                      " its own: make the optimizer with its parameters in the order that they had "
                      "when it was saved");
    return;
  }
}

// Returns the master of a parameter as it is saved: instead of a remainder the master that this
// represents. A master has adopted what other code wrote to the parameter; the present one stays,
// as the program may write the old values back.
at::Tensor saved_master(const at::Tensor& param, const at::Tensor& master) {
  if (!master.defined()) return {};
  if (master.scalar_type() != at::kFloat || !is_16bit(param.scalar_type()) || param.is_meta()) {
    return optim::whole_master(param, master);
  }
  const at::Tensor copy = master.clone();
  return optim::adopt_param(param, copy).item<bool>() ? copy : master;
}

}  // namespace

void FusedOptimizer::save(OutputArchive& archive) const {
  refuse_averaged("save");
  const c10::NoGradGuard no_grad;
  OutputArchive states(archive.compilation_unit());
  OutputArchive groups(archive.compilation_unit());
  write_size(groups, "param_groups/size", param_groups_.size());
  size_t params = 0;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    OutputArchive group(archive.compilation_unit());
    write_size(group, "params/size", param_groups_[i].params().size());
    for (size_t index = 0; index < param_groups_[i].params().size(); ++index) {
      const std::string key = std::to_string(params++);
      group.write("params/" + std::to_string(index), torch::IValue(key));
      const at::Tensor& param = param_groups_[i].params()[index];
      const FusedParamState* of_param = optim::find_state(state_, param);
      // Without a state torch's SGD starts its momentum.
      if (!of_param || (!of_param->has_started() && !of_param->master_param().defined())) continue;
      const auto copy = of_param->clone();
      auto& saved = static_cast<FusedParamState&>(*copy);
      saved.master_param(saved_master(param, saved.master_param()));
      OutputArchive state(archive.compilation_unit());
      saved.serialize(state);
      states.write(key, state);
    }
    OutputArchive options(archive.compilation_unit());
    param_groups_[i].options().serialize(options);
    group.write("options", options);
    groups.write("param_groups/" + std::to_string(i), group);
  }
  archive.write("pytorch_version", torch::IValue("1.5.0"));  // layout version, read by torch
  archive.write("state", states);
  archive.write("param_groups", groups);
}

void FusedOptimizer::load(InputArchive& archive) {
  refuse_averaged("load");
  const c10::NoGradGuard no_grad;
  InputArchive states;
  InputArchive groups;
  TORCH_CHECK_VALUE(archive.try_read("state", states) && archive.try_read("param_groups", groups),
                    "loaded state dict: expected the archive of an optimizer, which has a state "
                    "and param_groups; got one with ",
                    c10::Join(", ", archive.keys()));
  TORCH_CHECK_VALUE(read_size(groups, "param_groups/size") == param_groups_.size(),
                    "loaded state dict has a different number of parameter groups");
  std::vector<SavedGroup> saved;
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    InputArchive group;
    groups.read("param_groups/" + std::to_string(i), group);
    saved.push_back(read_saved_group(group, states, param_groups_[i], i, *rule_));
  }
  refuse_other_order(param_groups_, saved);
  // All new state has been made. Nothing below this fails.
  for (size_t i = 0; i < param_groups_.size(); ++i) {
    param_groups_[i].options().serialize(saved[i].options);
    for (size_t index = 0; index < saved[i].states.size(); ++index) {
      const at::Tensor& param = param_groups_[i].params()[index];
      if (saved[i].states[index]) {
        optim::put_state(state_, std::move(*saved[i].states[index]), param);
      } else {
        state_.erase(param.unsafeGetTensorImpl());
      }
    }
  }
  writes_after_step_.reset();
}

}  // namespace ampfuse
