#include "scale_policy.h"

#include <cmath>

#include "../ops/update_scale.h"

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
