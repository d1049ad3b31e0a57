#include "scale_policy.h"

#include <cmath>

#include "../ops/update_scale.h"
#include "../tensors/option_printer.h"

namespace ampfuse::amp {

namespace {

template <typename T>
void check(const char* name, const T& value, bool in_range, const char* expected) {
  TORCH_CHECK_VALUE(in_range, name, ": expected ", expected, ", got ", value);
}

}  // namespace

void check_scale(const char* name, double scale) {
  const auto narrow = static_cast<float>(scale);
  check(name, scale, narrow > 0 && std::isfinite(narrow), "a finite float above 0");
}

void check_initial_options(const GradScalerOptions& options) {
  TORCH_CHECK(!(options.growth_factor() <= 1), "The growth factor must be > 1.0, got ",
              options.growth_factor(), ".");
  TORCH_CHECK(!(options.backoff_factor() >= 1), "The backoff factor must be < 1.0, got ",
              options.backoff_factor(), ".");
  check_options(options);
  const double scale = options.init_scale();
  const auto low = options.min_scale();
  const auto high = options.max_scale();
  TORCH_CHECK_VALUE(!low || scale >= *low, "init_scale: expected at least min_scale=", *low,
                    ", got ", scale);
  TORCH_CHECK_VALUE(!high || scale <= *high, "init_scale: expected at most max_scale=", *high,
                    ", got ", scale);
}

void check_options(const GradScalerOptions& options) {
  check_scale("init_scale", options.init_scale());
  checked_scale_policy("", update_options(options));
  TORCH_CHECK_VALUE(!options.skip_outliers() || !options.process_group(),
                    "skip_outliers: expected None with a process_group, whose ranks have different "
                    "gradients");
  const auto skips = options.max_consecutive_skips();
  if (skips) check("max_consecutive_skips", *skips, *skips >= 1, "None or at least 1");
  check("history", options.history(), options.history() >= 0, "at least 0");
}

UpdateScaleOptions update_options(const GradScalerOptions& options) {
  return {.growth_factor = options.growth_factor(),
          .backoff_factor = options.backoff_factor(),
          .growth_interval = options.growth_interval(),
          .min_scale = options.min_scale(),
          .max_scale = options.max_scale(),
          .hysteresis = options.hysteresis(),
          .hysteresis_refill = options.hysteresis_refill(),
          .dynamic = options.dynamic(),
          .skip_outliers = options.skip_outliers()};
}

}  // namespace ampfuse::amp

namespace ampfuse {

namespace {

// Calls `visit` with the name of each option and its values in both sets of options.
template <typename Visit>
void visit_options(const GradScalerOptions& left, const GradScalerOptions& right, Visit visit) {
  visit("init_scale", left.init_scale(), right.init_scale());
  visit("growth_factor", left.growth_factor(), right.growth_factor());
  visit("backoff_factor", left.backoff_factor(), right.backoff_factor());
  visit("growth_interval", left.growth_interval(), right.growth_interval());
  visit("enabled", left.enabled(), right.enabled());
  visit("device", left.device(), right.device());
  visit("min_scale", left.min_scale(), right.min_scale());
  visit("max_scale", left.max_scale(), right.max_scale());
  visit("hysteresis", left.hysteresis(), right.hysteresis());
  visit("hysteresis_refill", left.hysteresis_refill(), right.hysteresis_refill());
  visit("dynamic", left.dynamic(), right.dynamic());
  visit("max_consecutive_skips", left.max_consecutive_skips(), right.max_consecutive_skips());
  visit("skip_outliers", left.skip_outliers(), right.skip_outliers());
  visit("history", left.history(), right.history());
  visit("process_group", left.process_group(), right.process_group());
  visit("allow_fp16_grads", left.allow_fp16_grads(), right.allow_fp16_grads());
  visit("allow_no_grads", left.allow_no_grads(), right.allow_no_grads());
}

std::ostream& print(std::ostream& stream, const char* name, const GradScalerOptions& options) {
  stream << name << "(";
  OptionPrinter print_option(stream);
  visit_options(options, options, [&](const char* option, const auto& value, const auto&) {
    print_option(option, value);
  });
  return stream << ")";
}

}  // namespace

bool operator==(const GradScalerOptions& left, const GradScalerOptions& right) {
  bool are_equal = true;
  visit_options(left, right, [&](const char*, const auto& value, const auto& other) {
    are_equal = are_equal && value == other;
  });
  return are_equal;
}

std::ostream& operator<<(std::ostream& stream, const GradScalerOptions& options) {
  return print(stream, "ampfuse::GradScalerOptions", options);
}

std::ostream& operator<<(std::ostream& stream, const GradScaler& scaler) {
  GradScalerOptions options = scaler.options();
  return print(stream, "ampfuse::GradScaler", options.enabled(scaler.is_enabled()));
}

}  // namespace ampfuse
