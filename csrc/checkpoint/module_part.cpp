#include "module_part.h"

#include <c10/core/GradMode.h>

#include <sstream>

#include "dtypes.h"

namespace ampfuse::checkpoint::detail {

namespace {

std::map<std::string, at::Tensor> tensors_of(const torch::nn::Module& model) {
  std::map<std::string, at::Tensor> tensors;
  for (const auto& param : model.named_parameters()) tensors[param.key()] = param.value();
  for (const auto& buffer : model.named_buffers()) tensors[buffer.key()] = buffer.value();
  return tensors;
}

// C++ models count batches in the dtype of their weights after to(dtype), Python's in int64.
at::ScalarType stored_dtype(const std::string& name, const at::Tensor& tensor) {
  return name.ends_with("num_batches_tracked") ? at::kLong : tensor.scalar_type();
}

std::string kind_text(const std::string& dtype, at::IntArrayRef shape) {
  return dtype + " of shape " + (std::ostringstream() << shape).str();
}

}  // namespace

Dict part_of(const torch::nn::Module& model, bool gradients) {
  Dict state = new_dict();
  for (const auto& [name, tensor] : tensors_of(model)) {
    state.insert(name, tensor.to(stored_dtype(name, tensor)));
  }
  Dict part = new_dict();
  part.insert("class", model.name());
  part.insert("state", state);
  part.insert("_metadata", new_dict());  // Python's modules have their versions here
  if (gradients) {
    Dict grads = new_dict();
    for (const auto& param : model.named_parameters()) {
      if (param.value().grad().defined()) grads.insert(param.key(), param.value().grad());
    }
    part.insert("gradients", grads);
  }
  return part;
}

void check_part(const torch::nn::Module& model, const at::IValue& part, const Index& index,
                Mistakes& mistakes) {
  if (!part.isGenericDict() || !part.toGenericDict().contains("_metadata")) {
    check_class("a model", part, mistakes);
    return;
  }
  const Dict stored = part.toGenericDict().at("state").toGenericDict();
  const auto own = tensors_of(model);
  for (const auto& entry : stored) {
    if (!own.contains(entry.key().toStringRef())) {
      mistakes.push_back("the checkpoint has " + entry.key().toStringRef() +
                         ", which the model lacks");
    }
  }
  for (const auto& [name, tensor] : own) {
    if (!stored.contains(name)) {
      mistakes.push_back("the model has " + name + ", which the checkpoint lacks");
      continue;
    }
    const auto found = stored_tensor(stored.at(name));
    if (!found) {
      mistakes.push_back(name + " is no tensor in the checkpoint");
      continue;
    }
    const TensorEntry& entry = index.tensors.at(found->name);
    const auto shape = found->unpermuted(entry.shape);
    const std::string in_checkpoint = kind_text(entry.dtype, shape);
    const std::string in_model =
        kind_text(names_of(stored_dtype(name, tensor)).torch, tensor.sizes());
    if (in_checkpoint != in_model) {
      mistakes.push_back(name + " is " + in_checkpoint + " in the checkpoint, and " + in_model +
                         " in the model");
    }
  }
}

void load_part(torch::nn::Module& model, const Dict& part) {
  const c10::NoGradGuard no_grad;
  const Dict stored = part.at("state").toGenericDict();
  for (auto& [name, tensor] : tensors_of(model)) tensor.copy_(stored.at(name).toTensor());
  if (!part.contains("gradients")) return;
  const Dict grads = part.at("gradients").toGenericDict();
  for (auto& param : model.named_parameters()) {
    const auto grad = grads.find(param.key());
    param.value().mutable_grad() =
        grad == grads.end() ? at::Tensor() : grad->value().toTensor().to(param.value().device());
  }
}

}  // namespace ampfuse::checkpoint::detail
