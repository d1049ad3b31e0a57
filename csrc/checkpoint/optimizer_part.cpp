#include "optimizer_part.h"

#include <ampfuse/checkpoint.h>
#include <ampfuse/optim.h>
#include <c10/util/StringUtil.h>
#include <c10/util/Type.h>
#include <torch/optim/adagrad.h>
#include <torch/optim/adam.h>
#include <torch/optim/adamw.h>
#include <torch/optim/rmsprop.h>
#include <torch/optim/sgd.h>

#include <algorithm>
#include <typeinfo>

#include "fused_state_dict.h"
#include "optimizer_archive.h"

namespace ampfuse::checkpoint::detail {

namespace {

// Entries of a state that have the shape of the parameter.
constexpr const char* kShapedLikeParams[] = {
    "exp_avg",  "exp_avg_sq", "max_exp_avg_sq", "momentum_buffer", "square_avg",
    "grad_avg", "sum",        "master_param",   "ema_param"};

// Returns the name of the class in Python if Python's class has the same state, else in C++.
std::string class_of(const torch::optim::Optimizer& optimizer) {
  if (dynamic_cast<const AdamW*>(&optimizer)) return "AdamW";
  if (dynamic_cast<const Adam*>(&optimizer)) return "Adam";
  if (dynamic_cast<const SGD*>(&optimizer)) return "SGD";
  const std::type_info& type = typeid(optimizer);
  if (type == typeid(torch::optim::SGD)) return "SGD";
  if (type == typeid(torch::optim::Adam)) return "Adam";
  if (type == typeid(torch::optim::AdamW)) return "AdamW";
  if (type == typeid(torch::optim::RMSprop)) return "RMSprop";
  if (type == typeid(torch::optim::Adagrad)) return "Adagrad";
  return c10::demangle(type.name());
}

std::vector<int64_t> stored_sizes(const List& groups) {
  std::vector<int64_t> sizes;
  for (const at::IValue& group : groups.vec()) {
    sizes.push_back(std::ssize(group.toGenericDict().at("params").toListRef()));
  }
  return sizes;
}

void check_shapes(const at::IValue& states, const std::vector<at::Tensor>& params,
                  const Index& index, Mistakes& mistakes) {
  const Dict encoded = states.toGenericDict();
  if (!encoded.contains("$dict")) return;  // no parameter has a state
  for (const at::IValue& number_and_state : encoded.at("$dict").toListRef()) {
    const size_t number = static_cast<size_t>(number_and_state.toListRef().at(0).toInt());
    const Dict state = number_and_state.toListRef().at(1).toGenericDict();
    for (const char* name : kShapedLikeParams) {
      const auto stored = state.contains(name) ? stored_tensor(state.at(name)) : std::nullopt;
      if (!stored || number >= params.size()) continue;
      const auto shape = stored->unpermuted(index.tensors.at(stored->name).shape);
      if (shape != params[number].sizes()) {
        mistakes.push_back(
            c10::str(name, " of parameter ", number, " has shape ", at::IntArrayRef(shape),
                     " in the checkpoint, and the parameter has ", params[number].sizes()));
      }
    }
  }
}

}  // namespace

Dict part_of(torch::optim::Optimizer& optimizer) {
  const auto* fused = dynamic_cast<const FusedOptimizer*>(&optimizer);
  Dict part = new_dict();
  part.insert("class", class_of(optimizer));
  part.insert("state", fused ? state_dict_of(*fused) : state_dict_of(optimizer));
  return part;
}

void check_part(const torch::optim::Optimizer& optimizer, const at::IValue& part,
                const Index& index, Mistakes& mistakes) {
  if (!check_class(class_of(optimizer), part, mistakes)) return;
  const Dict state = part.toGenericDict().at("state").toGenericDict();
  const List groups = state.at("param_groups").toList();
  std::vector<int64_t> sizes;
  std::vector<at::Tensor> params;
  for (const auto& group : optimizer.param_groups()) {
    sizes.push_back(std::ssize(group.params()));
    params.insert(params.end(), group.params().begin(), group.params().end());
  }
  if (sizes != stored_sizes(groups)) {
    mistakes.push_back(c10::str("its groups have ", at::IntArrayRef(sizes),
                                " parameters, those in the checkpoint ",
                                at::IntArrayRef(stored_sizes(groups))));
  }
  const bool has_maximize = dynamic_cast<const FusedOptimizer*>(&optimizer);
  for (const at::IValue& group : groups.vec()) {
    const Dict options = group.toGenericDict();
    if (!has_maximize && has(options, "maximize") && options.at("maximize").toBool()) {
      mistakes.push_back("the checkpoint has maximize=True, which C++'s " + class_of(optimizer) +
                         " lacks");
    }
  }
  check_shapes(state.at("state"), params, index, mistakes);
}

void load_part(torch::optim::Optimizer& optimizer, const Dict& part) {
  load_state_dict(optimizer, part.at("state").toGenericDict(), part.at("class").toStringRef());
}

}  // namespace ampfuse::checkpoint::detail
