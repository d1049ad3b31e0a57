#include "update_scale.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ampfuse/update_scale.h>

#include <limits>

#include "../tensors/tensor_list.h"
#include "registration.h"

namespace ampfuse {

namespace {

math::HysteresisRefill refill_named(std::string_view name) {
  if (name == "growth") return math::HysteresisRefill::kGrowth;
  if (name == "clean_step") return math::HysteresisRefill::kCleanStep;
  TORCH_CHECK_VALUE(false, kUpdateScale, ": hysteresis_refill: expected growth or clean_step, got ",
                    name);
}

void check_policy(const math::ScalePolicy& policy) {
  const auto check = [](const char* name, auto value, bool in_range, const char* range) {
    TORCH_CHECK_VALUE(in_range, kUpdateScale, ": ", name, ": expected ", range, ", got ", value);
  };
  check("growth_factor", policy.growth_factor, policy.growth_factor >= 1, "at least 1");
  check("backoff_factor", policy.backoff_factor,
        policy.backoff_factor > 0 && policy.backoff_factor <= 1, "more than 0 and at most 1");
  check("growth_interval", policy.growth_interval, policy.growth_interval >= 1, "at least 1");
  check("hysteresis", policy.hysteresis, policy.hysteresis >= 1, "at least 1");
  check("max_scale", policy.max_scale, policy.max_scale >= policy.min_scale, "at least min_scale");
}

// Throws unless the tensor is contiguous, of this size and dtype, and on the scale's device.
void check_state(const char* name, const at::Tensor& tensor, at::ScalarType dtype, int64_t size,
                 const at::Tensor& scale) {
  TORCH_CHECK_TYPE(tensor.defined(), kUpdateScale, ": ", name, ": expected a tensor, got none");
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided, kUpdateScale, ": ", name,
                    ": expected a strided tensor, got layout ", tensor.layout());
  TORCH_CHECK_TYPE(tensor.scalar_type() == dtype, kUpdateScale, ": ", name, ": expected dtype ",
                   dtype, ", got ", tensor.scalar_type());
  TORCH_CHECK_VALUE(tensor.sym_numel() == size && tensor.is_contiguous(), kUpdateScale, ": ", name,
                    ": expected a contiguous tensor with ", size, " elements, got shape ",
                    tensor.sym_sizes());
  TORCH_CHECK_VALUE(tensor.device() == scale.device(), kUpdateScale, ": ", name,
                    ": expected device ", scale.device(), " as scale, got ", tensor.device());
}

void check_history(const at::Tensor& history, const at::Tensor& scale) {
  TORCH_CHECK_TYPE(history.scalar_type() == at::kFloat, kUpdateScale,
                   ": history: expected dtype Float, got ", history.scalar_type());
  TORCH_CHECK_VALUE(history.dim() == 2 && history.sym_size(0) > 0 &&
                        history.sym_size(1) == math::kScaleRecord && history.is_contiguous(),
                    kUpdateScale, ": history: expected a contiguous tensor of shape [n, ",
                    math::kScaleRecord, "], n > 0, got shape ", history.sym_sizes());
  TORCH_CHECK_VALUE(history.device() == scale.device(), kUpdateScale, ": history: expected device ",
                    scale.device(), " as scale, got ", history.device());
}

}  // namespace

UpdateScaleArguments update_scale_arguments(const NamedArguments& named) {
  const auto limit_or = [&](const char* name, double otherwise) {
    return named[name].toOptional<double>().value_or(otherwise);
  };
  constexpr double kInfinity = std::numeric_limits<double>::infinity();
  const UpdateScaleArguments arguments = {
      .scale = named.tensor("scale"),
      .growth_tracker = named.tensor("growth_tracker"),
      .counters = named.tensor("counters"),
      .found_infs = named["found_infs"].toListRef(),
      .policy = {.growth_factor = named["growth_factor"].toDouble(),
                 .backoff_factor = named["backoff_factor"].toDouble(),
                 .growth_interval = named["growth_interval"].toInt(),
                 .min_scale = limit_or("min_scale", -kInfinity),
                 .max_scale = limit_or("max_scale", kInfinity),
                 .hysteresis = named["hysteresis"].toInt(),
                 .refill = refill_named(named["hysteresis_refill"].toStringView()),
                 .dynamic = named["dynamic"].toBool()},
      .history = named.optional_tensor("history"),
      .norm = named.optional_tensor("norm")};
  check_policy(arguments.policy);
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
  return arguments;
}

math::ScaleMemory UpdateScaleArguments::memory() const {
  return {
      scale.mutable_data_ptr<float>(),      growth_tracker.mutable_data_ptr<int32_t>(),
      counters.mutable_data_ptr<int64_t>(), history ? history->mutable_data_ptr<float>() : nullptr,
      history ? history->size(0) : 0,       norm ? norm->const_data_ptr<float>() : nullptr};
}

void update_scale(const ScaleTensors& tensors, at::TensorList found_infs,
                  const UpdateScaleOptions& options) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("ampfuse::update_scale", "")
          .typed<void(const at::Tensor&, const at::Tensor&, const at::Tensor&, at::TensorList,
                      double, double, int64_t, std::optional<double>, std::optional<double>,
                      int64_t, c10::string_view, bool, const std::optional<at::Tensor>&,
                      const std::optional<at::Tensor>&)>();
  op.call(tensors.scale, tensors.growth_tracker, tensors.counters, found_infs,
          options.growth_factor, options.backoff_factor, options.growth_interval, options.min_scale,
          options.max_scale, options.hysteresis, options.hysteresis_refill, options.dynamic,
          tensors.history, options.norm);
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
      "str hysteresis_refill=\"growth\", bool dynamic=True, Tensor(d!)? history=None, "
      "Tensor? norm=None) -> ()",
      {at::Tag::pt2_compliant_tag});
}

AMPFUSE_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("update_scale",
         kernel_by_name<with_arguments<update_scale_arguments, update_scale_no_backend>>());
}

}  // namespace ampfuse
