#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/ivalue.h>
#include <ampfuse/update_scale.h>

#include <optional>

#include "../math/update_scale.h"
#include "named_values.h"

namespace ampfuse {

/// The op's name in error messages.
inline constexpr const char* kUpdateScale = "update_scale";

/// The arguments of update_scale, checked.
struct UpdateScaleArguments {
  at::Tensor scale;
  at::Tensor growth_tracker;
  at::Tensor counters;
  c10::ArrayRef<c10::IValue> found_infs;
  math::ScalePolicy policy;
  std::optional<at::Tensor> history;
  std::optional<at::Tensor> norm;
  std::optional<at::Tensor> norms;

  math::ScaleMemory memory() const;
};

/// Converts the options. Throws if one is out of range, with a message that begins with `prefix`.
math::ScalePolicy checked_scale_policy(const char* prefix, const UpdateScaleOptions& options);

UpdateScaleArguments update_scale_arguments(const NamedArguments& arguments);

}  // namespace ampfuse
