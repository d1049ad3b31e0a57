// The states of the objects in a checkpoint, in the form of Python's state dictionaries. Include
// ampfuse/checkpoint.h, not this file.
#pragma once

#include <ATen/Context.h>
#include <ampfuse/checkpoint/files.h>
#include <ampfuse/grad_scaler.h>
#include <ampfuse/optim.h>
#include <torch/cuda.h>
#include <torch/nn/module.h>
#include <torch/nn/pimpl.h>

#include <variant>

namespace ampfuse::checkpoint {

/// A reference to a model, an optimizer or a scaler. That object must outlive the reference.
class Object {
 public:
  /// Refers to a model.
  Object(torch::nn::Module& model) : object_(&model) {}
  /// Refers to the model in a holder, for example torch::nn::Sequential.
  template <typename Module>
  Object(const torch::nn::ModuleHolder<Module>& model) : object_(model.ptr().get()) {}
  /// Refers to an ampfuse::Adam or ampfuse::AdamW.
  Object(Adam& optimizer) : object_(&optimizer) {}
  /// Refers to a scaler.
  Object(GradScaler& scaler) : object_(&scaler) {}

  using Kind = std::variant<torch::nn::Module*, Adam*, GradScaler*>;  ///< a pointer to the object
  /// Returns a pointer to the object.
  const Kind& get() const { return object_; }

 private:
  Kind object_;
};

namespace detail {

inline std::map<std::string, at::Tensor> tensors_of(const torch::nn::Module& model) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& param : model.named_parameters()) tensors[param.key()] = param.value();
  for (const auto& buffer : model.named_buffers()) tensors[buffer.key()] = buffer.value();
  return tensors;
}

/// C++ models count batches in the dtype of their weights after to(dtype), Python's in int64.
inline at::ScalarType stored_dtype(const std::string& name, const at::Tensor& tensor) {
  return name.ends_with("num_batches_tracked") ? at::kLong : tensor.scalar_type();
}

inline Dict state_of(const torch::nn::Module& model, bool gradients) {
  Dict state = new_dict();
  for (const auto& [name, tensor] : tensors_of(model)) {
    state.insert(name, tensor.to(stored_dtype(name, tensor)));
  }
  Dict parts = new_dict();
  parts.insert("class", model.name());
  parts.insert("state", state);
  parts.insert("_metadata", new_dict());  // Python's modules have their versions here
  if (gradients) {
    Dict grads = new_dict();
    for (const auto& param : model.named_parameters()) {
      if (param.value().grad().defined()) grads.insert(param.key(), param.value().grad());
    }
    parts.insert("gradients", grads);
  }
  return parts;
}

template <typename Options>
void add_options(const Options& options, Dict& group) {
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
}

inline const char* class_of(const Adam& optimizer) {
  return dynamic_cast<const AdamW*>(&optimizer) ? "AdamW" : "Adam";
}

/// Remainders are stored as the float masters that they represent, as in Python.
inline Dict state_of(const Adam& optimizer) {
  Dict states = new_dict();
  c10::impl::GenericList groups(c10::AnyType::get());
  const std::vector<at::Tensor> masters = optimizer.master_params();
  int64_t number = 0;
  for (const auto& group : optimizer.param_groups()) {
    c10::impl::GenericList numbers(c10::AnyType::get());
    for (const at::Tensor& param : group.params()) {
      numbers.push_back(number);
      const auto found = optimizer.state().find(param.unsafeGetTensorImpl());
      if (found != optimizer.state().end()) {
        const auto& of_param = static_cast<const AdamParamState&>(*found->second);
        Dict state = new_dict();
        const auto add = [&](const char* name, const at::Tensor& tensor) {
          if (tensor.defined()) state.insert(name, tensor);
        };
        add("step", of_param.step());
        add("exp_avg", of_param.exp_avg());
        add("exp_avg_sq", of_param.exp_avg_sq());
        add("max_exp_avg_sq", of_param.max_exp_avg_sq());
        if (of_param.master_param().defined()) {
          add("master_param", masters[static_cast<size_t>(number)]);
        }
        states.insert(number, state);
      }
      ++number;
    }
    Dict options = new_dict();
    if (const auto* adamw = dynamic_cast<const AdamWOptions*>(&group.options())) {
      add_options(*adamw, options);
    } else {
      add_options(static_cast<const AdamOptions&>(group.options()), options);
    }
    options.insert("params", numbers);
    groups.push_back(options);
  }
  Dict state = new_dict();
  state.insert("state", states);
  state.insert("param_groups", groups);
  Dict parts = new_dict();
  parts.insert("class", class_of(optimizer));
  parts.insert("state", state);
  return parts;
}

inline Dict state_of(const GradScaler& scaler) {
  Dict parts = new_dict();
  parts.insert("class", "GradScaler");
  parts.insert("state", scaler.state_dict());
  if (scaler.is_enabled()) {
    c10::impl::GenericList records(c10::AnyType::get());
    for (const ScaleRecord& record : scaler.history()) {
      records.push_back(c10::ivalue::Tuple::create({record.scale, record.skipped, record.norm}));
    }
    parts.insert("history", records);
  }
  return parts;
}

inline Dict random_states() {
  Dict states = new_dict();
  states.insert("torch", at::globalContext().defaultGenerator(at::kCPU).get_state());
  c10::impl::GenericList of_gpus(c10::AnyType::get());
  if (torch::cuda::is_available()) {
    for (c10::DeviceIndex i = 0; i < torch::cuda::device_count(); ++i) {
      const at::Device gpu(at::kCUDA, i);
      of_gpus.push_back(at::globalContext().defaultGenerator(gpu).get_state());
    }
    states.insert("cuda", of_gpus);
  }
  return states;
}

}  // namespace detail
}  // namespace ampfuse::checkpoint
