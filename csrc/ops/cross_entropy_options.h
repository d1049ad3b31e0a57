// The options that cross_entropy and linear_cross_entropy share.
#pragma once

#include <ATen/core/Reduction.h>
#include <c10/core/ScalarType.h>

#include <cstdint>
#include <iosfwd>
#include <optional>
#include <string>

#include "../math/cross_entropy.h"
#include "named_values.h"

namespace ampfuse {

struct CrossEntropyOptions;
struct LinearCrossEntropyOptions;

struct LossOptions {
  int64_t reduction = at::Reduction::Mean;
  int64_t ignore_index = -100;
  double label_smoothing = 0;
  double z_loss = 0;
  std::optional<double> softcap = {};

  bool is_mean() const { return reduction == at::Reduction::Mean; }
  /// True if each row has a loss of its own (reduction "none").
  bool is_per_row() const { return reduction == at::Reduction::None; }

  /// Throws for values out of range. softcap must be in range in `dtype`, the dtype of the loss.
  void check(const char* op, c10::ScalarType dtype) const;

  /// Throws if a denominator is given although the loss is no mean.
  void check_denominator(const char* op, bool is_given) const;

  /// Convert all options to named arguments, and back. A missing argument gets its default.
  NamedValues named() const;
  static LossOptions from(const FindValue& find);

  /// Returns the options as the arithmetic reads them, for a loss over `classes` classes.
  template <typename T, typename Number = T>
  math::LossTerms<T, Number> terms(int64_t classes) const {
    return {static_cast<T>(1 - label_smoothing),
            static_cast<T>(classes == 0 ? 0 : label_smoothing / static_cast<double>(classes)),
            static_cast<Number>(z_loss), static_cast<T>(softcap.value_or(0))};
  }
};

/// Returns the at::Reduction for "none", "mean" or "sum". Throws for other names.
int64_t loss_reduction(const char* op, const std::string& name);

/// Converts CrossEntropyOptions or LinearCrossEntropyOptions.
template <typename Options>
LossOptions loss_options(const char* op, const Options& options) {
  return {loss_reduction(op, options.reduction()), options.ignore_index(),
          options.label_smoothing(), options.z_loss(), options.softcap()};
}

/// Prints options in the form that a module shows, without tensors.
void print_loss_options(std::ostream& stream, const CrossEntropyOptions& options);
void print_loss_options(std::ostream& stream, const LinearCrossEntropyOptions& options);

}  // namespace ampfuse
