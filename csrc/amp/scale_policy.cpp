#include "scale_policy.h"

#include <cmath>

namespace ampfuse::amp {

namespace {

template <typename T>
void check(const char* name, const T& value, bool makes_sense, const char* expected) {
  TORCH_CHECK_VALUE(makes_sense, name, ": expected ", expected, ", got ", value);
}

}  // namespace

void check_scale(const char* name, double scale) {
  const auto narrow = static_cast<float>(scale);
  check(name, scale, narrow > 0 && std::isfinite(narrow), "a finite float above 0");
}

void check_first_options(const GradScalerOptions& options) {
  TORCH_CHECK(!(options.growth_factor() <= 1), "The growth factor must be > 1.0.");
  TORCH_CHECK(!(options.backoff_factor() >= 1), "The backoff factor must be < 1.0.");
  check_options(options);
  const double init_scale = options.init_scale();
  const bool in_range = init_scale >= options.min_scale().value_or(init_scale) &&
                        init_scale <= options.max_scale().value_or(init_scale);
  check("init_scale", init_scale, in_range, "a number from min_scale to max_scale");
}

void check_options(const GradScalerOptions& options) {
  const auto check_positive = [](const char* name, double number) {
    check(name, number, number > 0 && std::isfinite(number), "a finite number above 0");
  };
  check_scale("init_scale", options.init_scale());
  check_positive("growth_factor", options.growth_factor());
  check_positive("backoff_factor", options.backoff_factor());
  check("growth_factor", options.growth_factor(), options.growth_factor() >= 1, "at least 1");
  check("backoff_factor", options.backoff_factor(), options.backoff_factor() <= 1, "at most 1");
  check("growth_interval", options.growth_interval(), options.growth_interval() >= 1, "at least 1");
  const auto low = options.min_scale();
  const auto high = options.max_scale();
  if (low) check("min_scale", *low, *low > 0, "none or more than 0");
  if (high) check("max_scale", *high, *high > 0, "none or more than 0");
  if (low && high) check("max_scale", *high, *high >= *low, "at least min_scale");
  check("hysteresis", options.hysteresis(), options.hysteresis() >= 1, "at least 1");
  const std::string& refill = options.hysteresis_refill();
  check("hysteresis_refill", refill, refill == "growth" || refill == "clean_step",
        "growth or clean_step");
  const auto skips = options.max_consecutive_skips();
  if (skips) check("max_consecutive_skips", *skips, *skips >= 1, "none or at least 1");
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
          .dynamic = options.dynamic()};
}

}  // namespace ampfuse::amp
