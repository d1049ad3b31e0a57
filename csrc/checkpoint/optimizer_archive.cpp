#include "optimizer_archive.h"

#include <ATen/ops/scalar_tensor.h>
#include <ampfuse/checkpoint.h>
#include <ampfuse/fused_optimizer.h>
#include <torch/optim/lbfgs.h>
#include <torch/optim/sgd.h>
#include <torch/serialize/archive.h>

#include <map>
#include <typeinfo>

#include "encoding.h"

namespace ampfuse::checkpoint::detail {

namespace {

using torch::serialize::InputArchive;
using torch::serialize::OutputArchive;

// Returns what was written, to read it. Tensors stay on their devices unless one is given.
InputArchive reopened(OutputArchive& written, std::optional<at::Device> device) {
  std::string bytes;
  written.save_to([&](const void* data, size_t size) {
    bytes.append(static_cast<const char*>(data), size);
    return size;
  });
  InputArchive archive;
  archive.load_from(bytes.data(), bytes.size(), device);
  return archive;
}

Dict dict_of(InputArchive& archive) {
  Dict dict = new_dict();
  for (const std::string& key : archive.keys()) {
    at::IValue value;
    archive.read(key, value);
    dict.insert(key, value);
  }
  return dict;
}

size_t read_size(InputArchive& archive, const char* key) {
  at::Tensor size;
  archive.read(key, size);
  return static_cast<size_t>(size.item<int64_t>());
}

void write_size(OutputArchive& archive, const char* key, size_t size) {
  archive.write(key, at::scalar_tensor(static_cast<int64_t>(size), at::kLong));
}

// Returns a stored option in the type that the present one has. Python stores 1 where C++ expects
// 1.0, learning rates may be tensors there, and betas may be a list.
at::IValue option_like(const at::IValue& present, const at::IValue& stored) {
  if (stored.isNone() || present.isBool() || present.isString()) return stored;
  if (present.isInt()) return static_cast<int64_t>(to_double(stored));
  if (present.isTuple()) {
    const auto items =
        stored.isTuple() ? stored.toTupleRef().elements().vec() : stored.toListRef().vec();
    std::vector<at::IValue> numbers;
    for (const at::IValue& item : items) numbers.emplace_back(to_double(item));
    return c10::ivalue::Tuple::create(numbers);
  }
  const bool is_number = stored.isInt() || stored.isTensor();
  return is_number && (present.isDouble() || present.isNone()) ? to_double(stored) : stored;
}

void write_options(const torch::optim::OptimizerParamGroup& group, const Dict& stored,
                   const std::string& class_name, OutputArchive& archive) {
  for (const auto& option : options_of(group)) {
    const std::string& name = option.key().toStringRef();
    at::IValue value = option.value();
    if (stored.contains(name)) {
      value = option_like(value, stored.at(name));
    } else if (name == "decoupled_weight_decay") {
      value = class_name == "AdamW";  // torch's state dictionaries lack this option
    }
    archive.write(name, value);
  }
}

// Returns an entry of a parameter's state in the form of an archive.
at::IValue entry_of(const std::string& name, const at::IValue& stored, at::Device device) {
  if (stored.isTensor()) {
    const at::Tensor tensor = stored.toTensor();
    if (name == "step") return tensor.item<int64_t>();
    return tensor.to(device);
  }
  if (!stored.isList()) return stored;
  c10::List<at::Tensor> tensors;  // states of torch have no other lists
  for (const at::IValue& item : stored.toListRef()) {
    tensors.push_back(item.toTensor().to(device));
  }
  return tensors;
}

// Between two steps, `al` of LBFGS is not needed, and has undefined tensors, which torch's archives
// cannot hold.
void clear_scratch(torch::optim::Optimizer& optimizer) {
  if (!dynamic_cast<torch::optim::LBFGS*>(&optimizer)) return;
  for (auto& [param, state] : optimizer.state()) {
    static_cast<torch::optim::LBFGSParamState&>(*state).al(std::nullopt);
  }
}

}  // namespace

Dict options_of(const torch::optim::OptimizerParamGroup& group) {
  OutputArchive written;
  group.options().serialize(written);
  InputArchive archive = reopened(written, std::nullopt);
  return dict_of(archive);
}

Dict state_dict_of(torch::optim::Optimizer& optimizer) {
  clear_scratch(optimizer);
  OutputArchive written;
  optimizer.save(written);
  InputArchive archive = reopened(written, at::kCPU);
  InputArchive archived_states, archived_groups;
  if (!archive.try_read("state", archived_states) ||
      !archive.try_read("param_groups", archived_groups)) {
    throw Error("save: expected an optimizer whose save() writes what those of torch write");
  }
  Dict numbers = new_dict();  // of parameters, by their keys in the archive
  List groups = new_list();
  for (size_t i = 0; i < read_size(archived_groups, "param_groups/size"); ++i) {
    InputArchive archived_group, options;
    archived_groups.read("param_groups/" + std::to_string(i), archived_group);
    archived_group.read("options", options);
    List params = new_list();
    for (size_t j = 0; j < read_size(archived_group, "params/size"); ++j) {
      at::IValue key;
      archived_group.read("params/" + std::to_string(j), key);
      const auto number = static_cast<int64_t>(numbers.size());
      numbers.insert(key, number);
      params.push_back(number);
    }
    Dict group = dict_of(options);
    group.insert("params", params);
    groups.push_back(group);
  }
  Dict states = new_dict();
  for (const std::string& key : archived_states.keys()) {
    InputArchive archived_state;
    archived_states.read(key, archived_state);
    Dict state = dict_of(archived_state);
    if (has(state, "step") && state.at("step").isInt()) {
      state.insert_or_assign("step", at::scalar_tensor(state.at("step").toInt(), at::kFloat));
    }
    states.insert(numbers.at(key), state);
  }
  Dict result = new_dict();
  result.insert("state", states);
  result.insert("param_groups", groups);
  return result;
}

void load_state_dict(torch::optim::Optimizer& optimizer, const Dict& state,
                     const std::string& class_name) {
  // ampfuse's optimizers convert tensors and move them themselves.
  const bool converts = dynamic_cast<const FusedOptimizer*>(&optimizer);
  // torch's SGD steps each state that it has by its momentum, which ours may lack.
  const bool needs_momentum = typeid(optimizer) == typeid(torch::optim::SGD);
  const Dict stored_states = state.at("state").toGenericDict();
  const List stored_groups = state.at("param_groups").toList();
  OutputArchive archive, states, groups;
  write_size(groups, "param_groups/size", stored_groups.size());
  std::vector<void*> without_state;
  int64_t number = 0;
  for (size_t i = 0; i < stored_groups.size(); ++i) {
    const auto& group = optimizer.param_groups().at(i);
    OutputArchive archived_group, options;
    write_size(archived_group, "params/size", group.params().size());
    for (size_t j = 0; j < group.params().size(); ++j, ++number) {
      const std::string key = std::to_string(number);
      archived_group.write("params/" + std::to_string(j), torch::IValue(key));
      const at::Tensor& param = group.params()[j];
      const auto stored = stored_states.find(number);
      if (stored == stored_states.end() ||
          (needs_momentum && !has(stored->value().toGenericDict(), "momentum_buffer"))) {
        without_state.push_back(param.unsafeGetTensorImpl());
        continue;
      }
      OutputArchive archived_state;
      for (const auto& entry : stored->value().toGenericDict()) {
        const std::string& name = entry.key().toStringRef();
        if (entry.value().isNone()) continue;  // Python's SGD without momentum has it
        archived_state.write(
            name, entry_of(name, entry.value(), converts ? at::Device(at::kCPU) : param.device()));
      }
      states.write(key, archived_state);
    }
    const Dict stored_group = at::IValue(stored_groups.get(i)).toGenericDict();
    write_options(group, stored_group, class_name, options);
    archived_group.write("options", options);
    groups.write("param_groups/" + std::to_string(i), archived_group);
  }
  archive.write("pytorch_version", torch::IValue("1.5.0"));  // layout version, read by torch
  archive.write("state", states);
  archive.write("param_groups", groups);
  InputArchive input = reopened(archive, std::nullopt);
  optimizer.load(input);
  for (void* param : without_state) optimizer.state().erase(param);
}

}  // namespace ampfuse::checkpoint::detail
