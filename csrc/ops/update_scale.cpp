#include "update_scale.h"

#include <ATen/core/dispatch/Dispatcher.h>

#include <limits>
#include <string>

#include "../tensors/dtype_name.h"
#include "../tensors/tensor_list.h"
#include "named_arguments.h"
#include "registration.h"

namespace ampfuse {

namespace {

// Throws unless the tensor is contiguous, of this size and dtype, and on the scale's device.
void check_state(const char* name, const at::Tensor& tensor, at::ScalarType dtype,
                 const c10::SymInt& size, const at::Tensor& scale) {
  TORCH_CHECK_TYPE(tensor.defined(), kUpdateScale, ": ", name, ": expected a tensor, got none");
  check_strided(kUpdateScale, name, tensor);
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, kUpdateScale, ": ", name, ": expected dtype ",
                   dtype_name(dtype), ", got ", dtype_name(tensor.scalar_type()));
  TORCH_CHECK_VALUE(tensor.sym_numel() == size && tensor.is_contiguous(), kUpdateScale, ": ", name,
                    ": expected a contiguous tensor with ", size,
                    size == 1 ? " element" : " elements", ", got shape ", tensor.sym_sizes());
  TORCH_CHECK_VALUE(tensor.device() == scale.device(), kUpdateScale, ": ", name,
                    ": expected device ", scale.device(), ", that of scale, got ", tensor.device());
  check_memory(kUpdateScale, name, tensor);
}

void check_history(const at::Tensor& history, const at::Tensor& scale) {
  TORCH_CHECK_VALUE(
      history.dim() == 2 && history.sym_size(0) > 0 && history.sym_size(1) == math::kScaleRecord,
      kUpdateScale, ": history: expected a contiguous tensor of shape [n, ", math::kScaleRecord,
      "], n > 0, got shape ", history.sym_sizes());
  check_state("history", history, at::kFloat, history.sym_numel(), scale);
}

}  // namespace

math::ScalePolicy checked_scale_policy(const char* prefix, const UpdateScaleOptions& options) {
  const auto check = [prefix](const char* name, const auto& value, bool in_range,
                              const char* range) {
    TORCH_CHECK_VALUE(in_range, prefix, name, ": expected ", range, ", got ", value);
  };
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const double growth = options.growth_factor;
  const double backoff = options.backoff_factor;
  const double low = options.min_scale.value_or(-kInfinity);
  const double high = options.max_scale.value_or(kInfinity);
  const std::string& refill = options.hysteresis_refill;
  check("growth_factor", growth, growth >= 1 && growth < kInfinity, "a finite number, at least 1");
  check("backoff_factor", backoff, backoff > 0 && backoff <= 1, "more than 0 and at most 1");
  check("growth_interval", options.growth_interval, options.growth_interval >= 1, "at least 1");
  check("min_scale", low, !options.min_scale || low > 0, "None or more than 0");
  check("max_scale", high, !options.max_scale || high > 0, "None or more than 0");
  TORCH_CHECK_VALUE(low <= high, prefix, "max_scale: expected at least min_scale=", low, ", got ",
                    high);
  check("hysteresis", options.hysteresis, options.hysteresis >= 1, "at least 1");
  const double outliers = options.skip_outliers.value_or(2);
  check("skip_outliers", outliers, outliers > 1 && outliers < kInfinity,
        "None or a finite number above 1");
  const bool is_clean_step = refill == "clean_step";
  check("hysteresis_refill", refill, is_clean_step || refill == "growth",
        "\"growth\" or \"clean_step\"");
  return {.growth_factor = growth,
          .backoff_factor = backoff,
          .growth_interval = options.growth_interval,
          .min_scale = low,
          .max_scale = high,
          .hysteresis = options.hysteresis,
          .refill =
              is_clean_step ? math::HysteresisRefill::kCleanStep : math::HysteresisRefill::kGrowth,
          .dynamic = options.dynamic,
          .skip_outliers = options.skip_outliers.value_or(0)};
}

UpdateScaleArguments update_scale_arguments(const NamedArguments& named) {
  const UpdateScaleOptions options = {.growth_factor = named["growth_factor"].toDouble(),
                                      .backoff_factor = named["backoff_factor"].toDouble(),
                                      .growth_interval = named["growth_interval"].toInt(),
                                      .min_scale = named["min_scale"].toOptional<double>(),
                                      .max_scale = named["max_scale"].toOptional<double>(),
                                      .hysteresis = named["hysteresis"].toInt(),
                                      .hysteresis_refill = named["hysteresis_refill"].toStringRef(),
                                      .dynamic = named["dynamic"].toBool(),
                                      .skip_outliers = named["skip_outliers"].toOptional<double>()};
  const UpdateScaleArguments arguments = {.scale = named.tensor("scale"),
                                          .growth_tracker = named.tensor("growth_tracker"),
                                          .counters = named.tensor("counters"),
                                          .found_infs = named["found_infs"].toListRef(),
                                          .policy = checked_scale_policy("update_scale: ", options),
                                          .history = named.optional_tensor("history"),
                                          .norm = named.optional_tensor("norm"),
                                          .norms = named.optional_tensor("norms")};
  TORCH_CHECK_TYPE(arguments.scale.defined(), kUpdateScale, ": scale: expected a tensor, got none");
  const at::Tensor& scale = arguments.scale;
  check_state("scale", scale, at::kFloat, 1, scale);
  check_state("growth_tracker", arguments.growth_tracker, at::kInt, 1, scale);
  check_state("counters", arguments.counters, at::kLong, math::kScaleCounters, scale);
  for (size_t i = 0; i < arguments.found_infs.size(); ++i) {
    const std::string name = "found_infs[" + std::to_string(i) + "]";
    check_state(name.c_str(), arguments.found_infs[i].toTensor(), at::kFloat, 1, scale);
  }
  if (arguments.history) check_history(*arguments.history, scale);
  if (arguments.norm) check_state("norm", *arguments.norm, at::kFloat, 1, scale);
  if (arguments.norms) {
    check_state("norms", *arguments.norms, at::kDouble, math::kNormStatistics, scale);
    TORCH_CHECK_VALUE(arguments.norm && options.skip_outliers, kUpdateScale,
                      ": norms: only allowed with norm and skip_outliers");
  }
  return arguments;
}

math::ScaleMemory UpdateScaleArguments::memory() const {
  return {scale.mutable_data_ptr<float>(),
          growth_tracker.mutable_data_ptr<int32_t>(),
          counters.mutable_data_ptr<int64_t>(),
          history ? history->mutable_data_ptr<float>() : nullptr,
          history ? history->size(0) : 0,
          norm ? norm->const_data_ptr<float>() : nullptr,
          norms ? norms->mutable_data_ptr<double>() : nullptr};
}

void update_scale(const ScaleTensors& tensors, at::TensorList found_infs,
                  const UpdateScaleOptions& options) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("ampfuse::update_scale", "");
  call_by_name(op, {{"scale", tensors.scale},
                    {"growth_tracker", tensors.growth_tracker},
                    {"counters", tensors.counters},
                    {"found_infs", found_infs},
                    {"growth_factor", options.growth_factor},
                    {"backoff_factor", options.backoff_factor},
                    {"growth_interval", options.growth_interval},
                    {"min_scale", options.min_scale},
                    {"max_scale", options.max_scale},
                    {"hysteresis", options.hysteresis},
                    {"hysteresis_refill", options.hysteresis_refill},
                    {"dynamic", options.dynamic},
                    {"skip_outliers", options.skip_outliers},
                    {"history", tensors.history},
                    {"norm", options.norm},
                    {"norms", tensors.norms}});
}

namespace {

void update_scale_no_backend(const UpdateScaleArguments& arguments) {
  refuse_backend(kUpdateScale, {arguments.scale});
}

}  // namespace

AMPFUSE_OPERATORS(m) {
  m.def(
      "update_scale(Tensor(a!) scale, Tensor(b!) growth_tracker, Tensor(c!) counters, "
      "Tensor[] found_infs, *, float growth_factor, float backoff_factor, int growth_interval, "
      "float? min_scale=None, float? max_scale=None, int hysteresis=1, "
      "str hysteresis_refill=\"growth\", bool dynamic=True, float? skip_outliers=None, "
      "Tensor(d!)? history=None, Tensor? norm=None, Tensor(e!)? norms=None) -> ()",
      {at::Tag::pt2_compliant_tag});
}

AMPFUSE_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("update_scale",
         kernel_by_name<with_arguments<update_scale_arguments, update_scale_no_backend>>());
}

}  // namespace ampfuse
