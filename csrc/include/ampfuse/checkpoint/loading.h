// Compares stored states with objects, and loads them. Include ampfuse/checkpoint.h, not this file.
#pragma once

#include <ampfuse/checkpoint/objects.h>
#include <c10/core/GradMode.h>
#include <torch/serialize/archive.h>

#include <sstream>

namespace ampfuse::checkpoint::detail {

/// Returns the stored state, or null if each of several ranks has saved its own.
inline const Json* of_one_process(const Json& stored) {
  if (!stored.is_object() || !stored.contains("$ranks")) return &stored;
  return stored["$ranks"].size() == 1 ? &stored["$ranks"][0] : nullptr;
}

using Mistakes = std::vector<std::string>;

inline constexpr size_t kMostMistakes = 5;  // in a message

inline std::string text_of(const Mistakes& mistakes) {
  std::string text;
  for (size_t i = 0; i < std::min(mistakes.size(), kMostMistakes); ++i) {
    text += (i ? "; " : "") + mistakes[i];
  }
  const size_t more = mistakes.size() - std::min(mistakes.size(), kMostMistakes);
  return more ? text + "; and " + std::to_string(more) + " more" : text;
}

inline std::string kind_text(const std::string& dtype, at::IntArrayRef shape) {
  return dtype + " of shape " + (std::ostringstream() << shape).str();
}

inline void check(const torch::nn::Module& model, const Json& parts, const Json& tensors,
                  Mistakes& mistakes) {
  const Json& stored = parts["state"];
  const auto own = tensors_of(model);
  for (const auto& [name, value] : stored.items()) {
    if (!own.contains(name)) {
      mistakes.push_back("the checkpoint has " + name + ", which the model lacks");
    }
  }
  for (const auto& [name, tensor] : own) {
    if (!stored.contains(name)) {
      mistakes.push_back("the model has " + name + ", which the checkpoint lacks");
      continue;
    }
    std::set<std::string> names;
    add_tensors_of(stored[name], names);
    if (names.empty()) continue;
    const Json& entry = tensors[*names.begin()];
    auto shape = entry["shape"].get<std::vector<int64_t>>();
    if (stored[name].contains("$order")) {
      const auto order = stored[name]["$order"][0].get<std::vector<int64_t>>();
      shape = in_order(order, at::empty(shape, at::kMeta)).sizes().vec();
    }
    const std::string in_checkpoint = kind_text(entry["dtype"].get<std::string>(), shape);
    const std::string in_model =
        kind_text(names_of(stored_dtype(name, tensor)).torch, tensor.sizes());
    if (in_checkpoint != in_model) {
      mistakes.push_back(name + " is " + in_checkpoint + " in the checkpoint, and " + in_model +
                         " in the model");
    }
  }
}

/// Returns whether the stored state is that of this class.
inline bool check_class(const std::string& own, const Json& parts, Mistakes& mistakes) {
  const std::string other = "another object";
  const auto stored = parts.is_object() ? parts.value("class", other) : other;
  if (stored == own) return true;
  mistakes.push_back("the checkpoint has the state of " + stored + ", not of " + own);
  return false;
}

inline void check(const Adam& optimizer, const Json& parts, const Json&, Mistakes& mistakes) {
  if (!check_class(class_of(optimizer), parts, mistakes)) return;
  std::vector<size_t> sizes, stored_sizes;
  for (const auto& group : optimizer.param_groups()) sizes.push_back(group.params().size());
  for (const Json& group : parts["state"]["param_groups"]) {
    stored_sizes.push_back(group["params"].size());
  }
  if (sizes != stored_sizes) {
    mistakes.push_back(
        c10::str("its groups have ", sizes, " parameters, those in the checkpoint ", stored_sizes));
  }
}

inline void check(const GradScaler& scaler, const Json& parts, const Json&, Mistakes& mistakes) {
  if (!check_class("GradScaler", parts, mistakes)) return;
  if (scaler.is_enabled() && parts["state"].empty()) {
    mistakes.push_back("the checkpoint has the state of a disabled scaler");
  }
}

inline void load(torch::nn::Module& model, const Dict& parts) {
  const c10::NoGradGuard no_grad;
  const auto stored = parts.at("state").toGenericDict();
  for (auto& [name, tensor] : tensors_of(model)) tensor.copy_(stored.at(name).toTensor());
  if (!parts.contains("gradients")) return;
  const auto grads = parts.at("gradients").toGenericDict();
  for (auto& param : model.named_parameters()) {
    const auto grad = grads.find(param.key());
    param.value().mutable_grad() =
        grad == grads.end() ? at::Tensor() : grad->value().toTensor().to(param.value().device());
  }
}

inline double number(const at::IValue& value) {
  return value.isTensor() ? value.toTensor().item<double>() : value.toScalar().toDouble();
}

inline bool has(const Dict& dict, const char* key) {
  return dict.contains(key) && !dict.at(key).isNone();
}

template <typename Options>
void write_options(const Dict& group, torch::serialize::OutputArchive& archive) {
  Options options;
  options.lr(number(group.at("lr")));
  const auto betas = group.at("betas");
  const auto items =
      betas.isTuple() ? betas.toTupleRef().elements().vec() : betas.toListRef().vec();
  options.betas({number(items.at(0)), number(items.at(1))});
  options.eps(number(group.at("eps")));
  options.weight_decay(number(group.at("weight_decay")));
  options.amsgrad(group.at("amsgrad").toBool());
  options.maximize(group.at("maximize").toBool());
  if (has(group, "max_grad_norm")) options.max_grad_norm(number(group.at("max_grad_norm")));
  if (has(group, "write_back_grads")) {
    options.write_back_grads(group.at("write_back_grads").toBool());
  }
  options.serialize(archive);
}

/// Hands the state to the optimizer's load(), which checks and converts it.
inline void load(Adam& optimizer, const Dict& parts) {
  using torch::serialize::OutputArchive;
  const auto size = [](OutputArchive& archive, const char* name, size_t value) {
    archive.write(name, at::scalar_tensor(static_cast<int64_t>(value), at::kLong));
  };
  const auto stored = parts.at("state").toGenericDict();
  OutputArchive archive, states, groups;
  for (const auto& entry : stored.at("state").toGenericDict()) {
    const auto values = entry.value().toGenericDict();
    AdamParamState state;
    const auto take = [&](const char* name) {
      return has(values, name) ? values.at(name).toTensor() : at::Tensor();
    };
    state.step(take("step"));
    state.exp_avg(take("exp_avg"));
    state.exp_avg_sq(take("exp_avg_sq"));
    state.max_exp_avg_sq(take("max_exp_avg_sq"));
    state.master_param(take("master_param"));
    OutputArchive of_param;
    state.serialize(of_param);
    states.write(std::to_string(entry.key().toInt()), of_param);
  }
  const auto stored_groups = stored.at("param_groups").toListRef();
  size(groups, "param_groups/size", stored_groups.size());
  for (size_t i = 0; i < stored_groups.size(); ++i) {
    const auto group = stored_groups[i].toGenericDict();
    const auto numbers = group.at("params").toListRef();
    OutputArchive of_group, options;
    size(of_group, "params/size", numbers.size());
    for (size_t j = 0; j < numbers.size(); ++j) {
      of_group.write("params/" + std::to_string(j),
                     torch::IValue(std::to_string(numbers[j].toInt())));
    }
    const bool is_adamw = has(group, "decoupled_weight_decay")
                              ? group.at("decoupled_weight_decay").toBool()
                              : parts.at("class").toStringRef() == "AdamW";
    if (is_adamw) {
      write_options<AdamWOptions>(group, options);
    } else {
      write_options<AdamOptions>(group, options);
    }
    of_group.write("options", options);
    groups.write("param_groups/" + std::to_string(i), of_group);
  }
  archive.write("pytorch_version", torch::IValue("1.5.0"));
  archive.write("state", states);
  archive.write("param_groups", groups);
  std::stringstream stream;
  archive.save_to(stream);
  torch::serialize::InputArchive input;
  input.load_from(stream);
  optimizer.load(input);
}

inline void load(GradScaler& scaler, const Dict& parts) {
  scaler.load_state_dict(parts.at("state").toGenericDict());
  if (!scaler.is_enabled() || !parts.contains("history")) return;
  std::vector<ScaleRecord> records;
  for (const at::IValue& record : parts.at("history").toListRef()) {
    const auto& values = record.toTupleRef().elements();
    records.push_back({number(values.at(0)), values.at(1).toBool(), number(values.at(2))});
  }
  scaler.load_history(records);
}

/// Sets the states. GPUs that this machine does not have are left out.
inline void set_random_states(const Dict& states) {
  const auto set = [](at::Device device, const at::IValue& state) {
    auto generator = at::globalContext().defaultGenerator(device);
    generator.set_state(state.toTensor());
  };
  set(at::kCPU, states.at("torch"));
  if (!states.contains("cuda") || !torch::cuda::is_available()) return;
  c10::DeviceIndex gpu = 0;
  for (const at::IValue& state : states.at("cuda").toListRef()) {
    if (gpu < torch::cuda::device_count()) set(at::Device(at::kCUDA, gpu++), state);
  }
}

}  // namespace ampfuse::checkpoint::detail
