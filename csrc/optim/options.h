// Checks that the options of all fused optimizers share, and conversions to what an operator and an
// archive take.
#pragma once

#include <ATen/ops/scalar_tensor.h>
#include <torch/serialize/archive.h>

#include <string_view>

#include "../tensors/option_printer.h"
#include "rule.h"

namespace ampfuse::optim {

/// Throws for values that no step may have. `dtype_option` is the option with the dtype of moments.
void check_settings(const GroupSettings& settings, const char* dtype_option);

/// Throws for a negative learning rate or weight decay. Only constructors and add_param_group()
/// call this: schedules may go below 0 later, as in torch.
void check_initial(const GroupSettings& settings);

/// Throws for a decay or a dtype that averages cannot have.
void check_ema(std::optional<double> decay, at::ScalarType dtype);

/// Throws unless the limit is absent or at least 0.
void check_max_grad_norm(std::optional<double> max_grad_norm);

/// Makes the settings of a group, and checks them. A step needs `moments` moments.
template <typename Options>
GroupSettings checked_settings(const Options& options, size_t moments, const char* dtype_option,
                               at::ScalarType moment_dtype) {
  const GroupSettings settings = {.lr = options.lr(),
                                  .weight_decay = options.weight_decay(),
                                  .master_weights = options.master_weights(),
                                  .moment_dtype = moment_dtype,
                                  .max_grad_norm = options.max_grad_norm(),
                                  .write_back_grads = options.write_back_grads(),
                                  .moments = moments,
                                  .has_ema = options.ema().has_value(),
                                  .ema_dtype = options.ema_dtype()};
  check_ema(options.ema(), options.ema_dtype());
  check_settings(settings, dtype_option);
  return settings;
}

/// Makes an operator's options with the values that all operators take. They refer to the lists.
template <typename OperatorOptions, typename Options>
OperatorOptions operator_options(const Options& options, const StepSignals& signals,
                                 const StepLists& lists) {
  OperatorOptions made;
  made.lr = at::scalar_tensor(options.lr(), at::kDouble);
  made.weight_decay = options.weight_decay();
  made.maximize = options.maximize();
  made.write_back_grads = options.write_back_grads();
  made.grad_scale = signals.grad_scale;
  made.found_inf = signals.found_inf;
  made.total_norm = signals.total_norm;
  made.max_norm = signals.max_norm;
  made.grad_norm = signals.grad_norm;
  made.adopt_params = true;
  made.ema_decay = options.ema().value_or(0);
  made.round_at_random = options.master_weights() == MasterWeights::kStochastic;
  made.seed = options.seed();
  made.first_indices = lists.first_indices;
  return made;
}

/// Copies options without their limit of the norm, which the optimizer itself has.
template <typename Options>
std::unique_ptr<torch::optim::OptimizerOptions> without_limit(Options options) {
  options.max_grad_norm(std::nullopt);
  return std::make_unique<Options>(std::move(options));
}

template <typename T>
void read_option(torch::serialize::InputArchive& archive, const char* name, T& value) {
  torch::IValue saved;
  if (!archive.try_read(name, saved)) return;
  // An optimizer with averages may go on from an archive of one without.
  if (std::string_view(name) == "ema" && saved.isNone()) return;
  value = saved.to<T>();
}

template <typename T>
void write_option(torch::serialize::OutputArchive& archive, const char* name, const T& value) {
  archive.write(name, torch::IValue(value));
}

// Archives lack the kind of masters and the dtypes of moments and averages: they determine how
// state is stored, not what is computed.
inline void read_option(torch::serialize::InputArchive&, const char*, MasterWeights&) {}
inline void read_option(torch::serialize::InputArchive&, const char*, at::ScalarType&) {}
inline void write_option(torch::serialize::OutputArchive&, const char*, MasterWeights) {}
inline void write_option(torch::serialize::OutputArchive&, const char*, at::ScalarType) {}

/// Reads the options that the archive has. `visit_options` calls its last argument with the name of
/// each option and its values in both sets of options, which may be one.
template <typename Options, typename VisitOptions>
void read_options(torch::serialize::InputArchive& archive, Options& options,
                  VisitOptions visit_options) {
  visit_options(options, options,
                [&](const char* name, auto& value, auto&) { read_option(archive, name, value); });
}

/// Writes all options. `visit_options` is as for read_options().
template <typename Options, typename VisitOptions>
void write_options(torch::serialize::OutputArchive& archive, const Options& options,
                   VisitOptions visit_options) {
  visit_options(options, options, [&](const char* name, const auto& value, const auto&) {
    write_option(archive, name, value);
  });
}

/// Compares options. `visit_options` is as for read_options().
template <typename Options, typename VisitOptions>
bool are_equal(const Options& left, const Options& right, VisitOptions visit_options) {
  bool are_equal = true;
  visit_options(left, right, [&](const char*, const auto& value, const auto& other) {
    are_equal = are_equal && value == other;
  });
  return are_equal;
}

/// Prints options. `visit_options` is as for read_options().
template <typename Options, typename VisitOptions>
std::ostream& print(std::ostream& stream, const char* name, const Options& options,
                    VisitOptions visit_options) {
  stream << name << "(";
  OptionPrinter print_option(stream);
  visit_options(options, options, [&](const char* option, const auto& value, const auto&) {
    print_option(option, value);
  });
  return stream << ")";
}

}  // namespace ampfuse::optim
