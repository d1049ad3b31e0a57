#include <torch/serialize/archive.h>

#include <cmath>

#include "../tensors/dtype_name.h"
#include "../tensors/option_printer.h"
#include "adam_options.h"

namespace ampfuse {

namespace {

template <typename T>
void read(torch::serialize::InputArchive& archive, const char* name, T& value) {
  torch::IValue saved;
  if (archive.try_read(name, saved)) value = saved.to<T>();
}

// Calls `visit` with the name of each option and its values in both sets of options.
template <bool kDecoupledWeightDecay, typename Visit>
void visit_options(const AdamOptionsOf<kDecoupledWeightDecay>& left,
                   const AdamOptionsOf<kDecoupledWeightDecay>& right, Visit visit) {
  visit("lr", left.lr(), right.lr());
  visit("betas", left.betas(), right.betas());
  visit("eps", left.eps(), right.eps());
  visit("weight_decay", left.weight_decay(), right.weight_decay());
  visit("amsgrad", left.amsgrad(), right.amsgrad());
  visit("maximize", left.maximize(), right.maximize());
  visit("master_weights", left.master_weights(), right.master_weights());
  visit("state_dtype", left.state_dtype(), right.state_dtype());
  visit("max_grad_norm", left.max_grad_norm(), right.max_grad_norm());
  visit("write_back_grads", left.write_back_grads(), right.write_back_grads());
}

}  // namespace

std::ostream& operator<<(std::ostream& stream, MasterWeights kind) {
  if (kind == MasterWeights::kOff) return stream << "kOff";
  return stream << (kind == MasterWeights::kAuto ? "kAuto" : "kRemainder");
}

template <bool kDecoupledWeightDecay>
bool operator==(const AdamOptionsOf<kDecoupledWeightDecay>& left,
                const AdamOptionsOf<kDecoupledWeightDecay>& right) {
  bool are_equal = true;
  visit_options(left, right, [&](const char*, const auto& value, const auto& other) {
    are_equal = are_equal && value == other;
  });
  return are_equal;
}

template <bool kDecoupledWeightDecay>
std::ostream& operator<<(std::ostream& stream,
                         const AdamOptionsOf<kDecoupledWeightDecay>& options) {
  stream << (kDecoupledWeightDecay ? "ampfuse::AdamWOptions(" : "ampfuse::AdamOptions(");
  OptionPrinter print_option(stream);
  visit_options(options, options, [&](const char* option, const auto& value, const auto&) {
    print_option(option, value);
  });
  return stream << ")";
}

template AMPFUSE_API bool operator==(const AdamOptions&, const AdamOptions&);
template AMPFUSE_API bool operator==(const AdamWOptions&, const AdamWOptions&);
template AMPFUSE_API std::ostream& operator<<(std::ostream&, const AdamOptions&);
template AMPFUSE_API std::ostream& operator<<(std::ostream&, const AdamWOptions&);

template <bool kDecoupledWeightDecay>
void AdamOptionsOf<kDecoupledWeightDecay>::serialize(torch::serialize::InputArchive& archive) {
  bool decoupled = kDecoupledWeightDecay;  // torch's archives lack this entry
  read(archive, "decoupled_weight_decay", decoupled);
  TORCH_CHECK_VALUE(kDecoupledWeightDecay || !decoupled,
                    "decoupled_weight_decay: expected an archive of AdamOptions, got one of "
                    "AdamWOptions; load it into AdamWOptions");
  read(archive, "lr", lr());
  read(archive, "betas", betas());
  read(archive, "eps", eps());
  read(archive, "weight_decay", weight_decay());
  read(archive, "amsgrad", amsgrad());
  read(archive, "maximize", maximize());
  read(archive, "max_grad_norm", max_grad_norm());
  read(archive, "write_back_grads", write_back_grads());
}

template <bool kDecoupledWeightDecay>
void AdamOptionsOf<kDecoupledWeightDecay>::serialize(
    torch::serialize::OutputArchive& archive) const {
  archive.write("lr", torch::IValue(lr()));
  archive.write("betas", torch::IValue(betas()));
  archive.write("eps", torch::IValue(eps()));
  archive.write("weight_decay", torch::IValue(weight_decay()));
  archive.write("amsgrad", torch::IValue(amsgrad()));
  archive.write("maximize", torch::IValue(maximize()));
  archive.write("decoupled_weight_decay", torch::IValue(kDecoupledWeightDecay));
  archive.write("max_grad_norm", torch::IValue(max_grad_norm()));
  archive.write("write_back_grads", torch::IValue(write_back_grads()));
}

template struct AdamOptionsOf<false>;
template struct AdamOptionsOf<true>;

namespace optim {

namespace {

template <bool kDecoupledWeightDecay>
AdamSettings settings(const AdamOptionsOf<kDecoupledWeightDecay>& options) {
  return {.lr = options.lr(),
          .beta1 = std::get<0>(options.betas()),
          .beta2 = std::get<1>(options.betas()),
          .eps = options.eps(),
          .weight_decay = options.weight_decay(),
          .amsgrad = options.amsgrad(),
          .maximize = options.maximize(),
          .decoupled_weight_decay = kDecoupledWeightDecay,
          .master_weights = options.master_weights(),
          .state_dtype = options.state_dtype(),
          .max_grad_norm = options.max_grad_norm(),
          .write_back_grads = options.write_back_grads()};
}

AdamSettings settings(const torch::optim::OptimizerOptions& options, size_t group) {
  if (const auto* adam = dynamic_cast<const AdamOptions*>(&options)) return settings(*adam);
  const auto* adamw = dynamic_cast<const AdamWOptions*>(&options);
  TORCH_CHECK_TYPE(adamw, "options of group ", group,
                   ": expected ampfuse::AdamOptions or ampfuse::AdamWOptions");
  return settings(*adamw);
}

}  // namespace

AdamSettings checked_settings(const torch::optim::OptimizerOptions& options, size_t group) {
  const AdamSettings checked = settings(options, group);
  TORCH_CHECK_VALUE(checked.beta1 >= 0 && checked.beta1 < 1,
                    "Invalid beta parameter at index 0: ", checked.beta1);
  TORCH_CHECK_VALUE(checked.beta2 >= 0 && checked.beta2 < 1,
                    "Invalid beta parameter at index 1: ", checked.beta2);
  TORCH_CHECK_VALUE(checked.eps >= 0, "Invalid epsilon value: ", checked.eps);
  TORCH_CHECK_VALUE(std::isfinite(checked.lr), "Invalid learning rate: ", checked.lr);
  TORCH_CHECK_VALUE(std::isfinite(checked.weight_decay),
                    "Invalid weight_decay value: ", checked.weight_decay);
  TORCH_CHECK_VALUE(checked.state_dtype == at::kFloat || checked.state_dtype == at::kBFloat16,
                    "state_dtype: expected float32 or bfloat16, got ",
                    dtype_name(checked.state_dtype));
  check_max_grad_norm(checked.max_grad_norm);
  return checked;
}

void check_initial(const AdamSettings& settings) {
  TORCH_CHECK_VALUE(settings.lr >= 0, "Invalid learning rate: ", settings.lr);
  TORCH_CHECK_VALUE(settings.weight_decay >= 0,
                    "Invalid weight_decay value: ", settings.weight_decay);
}

void warn_of_slow_decay(const AdamSettings& settings) {
  if (settings.state_dtype != at::kBFloat16 || settings.beta2 <= 1 - 0x1p-8) return;
  TORCH_WARN("state_dtype of bfloat16 with a second beta of ", settings.beta2,
             ": rounding keeps a bfloat16 second moment from shrinking if the second beta is above "
             "0.996, so steps stay too small after large gradients. Pass for example "
             "betas({0.9, 0.95})");
}

void check_max_grad_norm(std::optional<double> max_grad_norm) {
  TORCH_CHECK_VALUE(!max_grad_norm || *max_grad_norm >= 0,
                    "max_grad_norm: expected None or at least 0, got ", *max_grad_norm);
}

}  // namespace optim

}  // namespace ampfuse
