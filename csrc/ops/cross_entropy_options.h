// The options that both losses have, as one value.
#pragma once

#include <ATen/core/Reduction.h>

#include <cstdint>
#include <optional>
#include <ostream>
#include <string>

#include "../math/cross_entropy.h"
#include "named_arguments.h"

namespace ampfuse {

struct LossOptions {
  int64_t reduction = at::Reduction::Mean;
  int64_t ignore_index = -100;
  double label_smoothing = 0;
  double z_loss = 0;
  std::optional<double> softcap = {};

  bool is_mean() const { return reduction == at::Reduction::Mean; }
  /// Whether there is a loss for each row.
  bool is_per_row() const { return reduction == at::Reduction::None; }

  /// Refuses values out of range; softcap as it is rounded to `dtype`, the loss's.
  void check(const char* op, at::ScalarType dtype) const;

  /// All options under their names in schemas, and back. Options without a value have their
  /// defaults.
  NamedValues named() const;
  static LossOptions from(const FindValue& find);

  /// The options as a module prints them.
  void print(std::ostream& stream) const;

  /// The options as the arithmetic reads them, where the loss has so many classes.
  template <typename T, typename Number = T>
  math::LossTerms<T, Number> terms(int64_t classes) const {
    return {static_cast<T>(1 - label_smoothing),
            static_cast<T>(classes == 0 ? 0 : label_smoothing / static_cast<double>(classes)),
            static_cast<Number>(z_loss), static_cast<T>(softcap.value_or(0))};
  }
};

/// at::Reduction of "none", "mean" or "sum".
int64_t loss_reduction(const char* op, const std::string& name);

/// The options of CrossEntropyOptions or LinearCrossEntropyOptions.
template <typename Options>
LossOptions loss_options(const char* op, const Options& options) {
  return {loss_reduction(op, options.reduction()), options.ignore_index(),
          options.label_smoothing(), options.z_loss(), options.softcap()};
}

}  // namespace ampfuse
