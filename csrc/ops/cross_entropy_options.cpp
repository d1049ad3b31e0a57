#include "cross_entropy_options.h"

#include <ampfuse/linear_cross_entropy.h>

#include "../tensors/dtype_name.h"
#include "../tensors/option_printer.h"
#include "named_arguments.h"

namespace ampfuse {

namespace {

const char* name_of(const LossReduction& reduction) {
  if (std::holds_alternative<torch::enumtype::kNone>(reduction)) return "none";
  return std::holds_alternative<torch::enumtype::kMean>(reduction) ? "mean" : "sum";
}

template <typename Options>
OptionPrinter print_shared_options(std::ostream& stream, const Options& options) {
  OptionPrinter print(stream);
  print("reduction", options.reduction());
  print("ignore_index", options.ignore_index());
  print("label_smoothing", options.label_smoothing());
  if (options.z_loss() != 0) print("z_loss", options.z_loss());
  print("softcap", options.softcap());
  return print;
}

}  // namespace

CrossEntropyOptions& CrossEntropyOptions::reduction(const LossReduction& value) {
  return reduction(std::string(name_of(value)));
}

LinearCrossEntropyOptions& LinearCrossEntropyOptions::reduction(const LossReduction& value) {
  return reduction(std::string(name_of(value)));
}

void print_loss_options(std::ostream& stream, const CrossEntropyOptions& options) {
  print_shared_options(stream, options);
}

void print_loss_options(std::ostream& stream, const LinearCrossEntropyOptions& options) {
  OptionPrinter print = print_shared_options(stream, options);
  print("chunk_rows", options.chunk_rows());
  print("chunk_classes", options.chunk_classes());
  if (options.logits_dtype()) print("logits_dtype", dtype_name(*options.logits_dtype()));
}

std::ostream& operator<<(std::ostream& stream, const CrossEntropyOptions& options) {
  stream << "ampfuse::CrossEntropyOptions(";
  print_loss_options(stream, options);
  return stream << ")";
}

std::ostream& operator<<(std::ostream& stream, const LinearCrossEntropyOptions& options) {
  stream << "ampfuse::LinearCrossEntropyOptions(";
  print_loss_options(stream, options);
  return stream << ")";
}

void LossOptions::check(const char* op, c10::ScalarType dtype) const {
  TORCH_CHECK_VALUE(label_smoothing >= 0 && label_smoothing <= 1, op,
                    ": label_smoothing must be between 0.0 and 1.0. Got: ", label_smoothing);
  TORCH_CHECK_VALUE(math::is_finite(static_cast<float>(z_loss)) && z_loss >= 0, op,
                    ": z_loss: expected a finite number, at least 0, got ", z_loss);
  const double cap = softcap.value_or(1);
  const double rounded = dtype == at::kDouble ? cap : static_cast<float>(cap);
  TORCH_CHECK_VALUE(math::is_finite(rounded) && rounded > 0, op,
                    ": softcap: expected a finite number above 0, got ", cap);
  TORCH_CHECK_VALUE(reduction >= at::Reduction::None && reduction < at::Reduction::END, op,
                    ": reduction: expected 0 (none), 1 (mean) or 2 (sum), got ", reduction);
}

void LossOptions::check_denominator(const char* op, bool is_given) const {
  TORCH_CHECK_VALUE(!is_given || is_mean(), op,
                    ": denominator: only allowed with reduction=\"mean\", got \"",
                    is_per_row() ? "none" : "sum", "\"");
}

NamedValues LossOptions::named() const {
  return {{"reduction", reduction},
          {"ignore_index", ignore_index},
          {"label_smoothing", label_smoothing},
          {"z_loss", z_loss},
          {"softcap", softcap}};
}

LossOptions LossOptions::from(const FindValue& find) {
  LossOptions options;
  if (const auto* value = find("reduction")) options.reduction = value->toInt();
  if (const auto* value = find("ignore_index")) options.ignore_index = value->toInt();
  if (const auto* value = find("label_smoothing")) options.label_smoothing = value->toDouble();
  if (const auto* value = find("z_loss")) options.z_loss = value->toDouble();
  if (const auto* value = find("softcap")) options.softcap = value->toOptional<double>();
  return options;
}

int64_t loss_reduction(const char* op, const std::string& name) {
  if (name == "none") return at::Reduction::None;
  if (name == "mean") return at::Reduction::Mean;
  if (name == "sum") return at::Reduction::Sum;
  TORCH_CHECK_VALUE(false, op, ": reduction: expected \"none\", \"mean\" or \"sum\", got ", name);
}

}  // namespace ampfuse
