// Saves and loads the state of a scaler: as a dictionary with Python's keys, and in archives with
// the same entries.
#include <ampfuse/grad_scaler.h>
#include <torch/serialize/archive.h>

#include <array>
#include <cmath>
#include <limits>

#include "scale_policy.h"
#include "scaler_state.h"

namespace ampfuse {

namespace {

using StateDict = c10::impl::GenericDict;

StateDict empty_state_dict() {
  return StateDict(c10::StringType::get(), c10::AnyType::get());
}

// Names of the norm statistics, in the order of their tensor.
constexpr std::array kNormKeys = {"_norms", "_norm_mean", "_norm_variance", "_norm_limit"};
static_assert(kNormKeys.size() == math::kNormStatistics);

void refuse(const char* key, const char* expected, const at::IValue& got) {
  TORCH_CHECK_VALUE(false, "GradScaler's state: ", key, ": expected ", expected, ", got ", got);
}

double number(const char* key, const at::IValue& value) {
  if (!value.isInt() && !value.isDouble()) refuse(key, "a number", value);
  return value.toScalar().toDouble();
}

int64_t count(const char* key, const at::IValue& value, int64_t most = int64_t{1} << 62) {
  if (!value.isInt() || value.toInt() < 0) refuse(key, "a whole number, at least 0", value);
  TORCH_CHECK_VALUE(value.toInt() <= most, "GradScaler's state: ", key, ": expected at most ", most,
                    ", got ", value);
  return value.toInt();
}

// Reads the entries of a state dictionary. Those that torch also saves are required, the others
// optional.
class Reader {
 public:
  explicit Reader(const StateDict& entries) : entries_(entries) {}

  at::IValue required(const char* key) const {
    const auto found = entries_.find(key);
    TORCH_CHECK_VALUE(found != entries_.end(), "GradScaler's state: expected an entry \"", key,
                      "\", got none");
    return found->value();
  }

  template <typename Take>
  void if_present(const char* key, const Take& take) const {
    const auto found = entries_.find(key);
    if (found != entries_.end()) take(key, found->value());
  }

 private:
  const StateDict& entries_;
};

std::optional<double> limit(const char* key, const at::IValue& value) {
  if (value.isNone()) return std::nullopt;
  return number(key, value);
}

double known(const char* key, const at::IValue& value) {
  const double found = number(key, value);
  if (std::isnan(found)) refuse(key, "a number", value);
  return found;
}

GradScalerOptions loaded_options(GradScalerOptions options, const Reader& state) {
  options.growth_factor(number("growth_factor", state.required("growth_factor")));
  options.backoff_factor(number("backoff_factor", state.required("backoff_factor")));
  options.growth_interval(count("growth_interval", state.required("growth_interval")));
  state.if_present("min_scale",
                   [&](auto key, auto& value) { options.min_scale(limit(key, value)); });
  state.if_present("max_scale",
                   [&](auto key, auto& value) { options.max_scale(limit(key, value)); });
  state.if_present("hysteresis",
                   [&](auto key, auto& value) { options.hysteresis(count(key, value)); });
  state.if_present("hysteresis_refill", [&](auto key, auto& value) {
    if (!value.isString()) refuse(key, "a string", value);
    options.hysteresis_refill(value.toStringRef());
  });
  state.if_present("dynamic", [&](auto key, auto& value) {
    if (!value.isBool()) refuse(key, "true or false", value);
    options.dynamic(value.toBool());
  });
  state.if_present("skip_outliers",
                   [&](auto key, auto& value) { options.skip_outliers(limit(key, value)); });
  amp::check_options(options);
  return options;
}

}  // namespace

StateDict GradScaler::state_dict() const {
  StateDict entries = empty_state_dict();
  if (!is_enabled()) return entries;
  const GradScalerOptions& options = state_->options;
  const auto [hysteresis, skips, updates] = state_->history.counts();
  entries.insert("scale", state_->host_scale());
  entries.insert("growth_factor", options.growth_factor());
  entries.insert("backoff_factor", options.backoff_factor());
  entries.insert("growth_interval", options.growth_interval());
  entries.insert("_growth_tracker", state_->host_growth_tracker());
  entries.insert("min_scale", options.min_scale());
  entries.insert("max_scale", options.max_scale());
  entries.insert("hysteresis", options.hysteresis());
  entries.insert("hysteresis_refill", options.hysteresis_refill());
  entries.insert("dynamic", options.dynamic());
  entries.insert("skip_outliers", options.skip_outliers());
  entries.insert("_hysteresis_tracker", hysteresis);
  entries.insert("_consecutive_skips", skips);
  entries.insert("_updates", updates);
  const auto norms = state_->history.norm_statistics();
  for (size_t i = 0; i < norms.size(); ++i) entries.insert(kNormKeys[i], norms[i]);
  return entries;
}

void GradScaler::load_state_dict(const StateDict& entries) {
  if (!is_enabled()) return;
  TORCH_CHECK(!entries.empty(),
              "The source state dict is empty, possibly because it was saved from a disabled "
              "instance of GradScaler.");
  const Reader state(entries);
  const GradScalerOptions options = loaded_options(state_->options, state);
  const double scale = number("scale", state.required("scale"));
  if (!(scale >= 0 && std::isfinite(static_cast<float>(scale)))) {
    refuse("scale", "a finite float, at least 0", scale);
  }
  const int64_t growth_tracker =
      count("_growth_tracker", state.required("_growth_tracker"), std::numeric_limits<int>::max());
  amp::ScalerHistory::Counts counts = state_->history.counts();
  const auto load = [&](const char* key, math::ScaleCounter counter) {
    state.if_present(key, [&](auto, auto& value) { counts[counter] = count(key, value); });
  };
  load("_hysteresis_tracker", math::kHysteresisTracker);
  load("_consecutive_skips", math::kConsecutiveSkips);
  load("_updates", math::kUpdates);
  amp::ScalerHistory::Norms norms = state_->history.norm_statistics();
  for (size_t i = 0; i < norms.size(); ++i) {
    state.if_present(kNormKeys[i], [&](auto key, auto& value) { norms[i] = known(key, value); });
  }

  state_->options = options;
  state_->set_scale(scale, growth_tracker);
  state_->history.set_counts(counts);
  state_->history.set_norm_statistics(norms);
  for (amp::OptimizerState& of_optimizer : state_->optimizers) of_optimizer.is_loaded = true;
}

void GradScaler::save(torch::serialize::OutputArchive& archive) const {
  for (const auto& entry : state_dict()) archive.write(entry.key().toStringRef(), entry.value());
}

void GradScaler::load(torch::serialize::InputArchive& archive) {
  StateDict entries = empty_state_dict();
  for (const auto& entry : state_dict()) {  // the entries that save() writes
    const std::string& key = entry.key().toStringRef();
    at::IValue value;
    if (archive.try_read(key, value)) entries.insert(key, value);
  }
  TORCH_CHECK(!is_enabled() || !entries.empty() || archive.keys().empty(),
              "GradScaler: expected the archive of a scaler, got one with ",
              c10::Join(", ", archive.keys()));
  load_state_dict(entries);
}

torch::serialize::OutputArchive& operator<<(torch::serialize::OutputArchive& archive,
                                            const GradScaler& scaler) {
  scaler.save(archive);
  return archive;
}

torch::serialize::InputArchive& operator>>(torch::serialize::InputArchive& archive,
                                           GradScaler& scaler) {
  scaler.load(archive);
  return archive;
}

}  // namespace ampfuse
