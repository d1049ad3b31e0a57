#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>
#include <torch/library.h>

#include <optional>

#include "../math/update_scale.h"

namespace ampfuse {

/// The op's name in error messages.
inline constexpr const char* kUpdateScale = "update_scale";

/// The op's arguments, of which its schema has fourteen, checked.
struct UpdateScaleArguments {
  at::Tensor scale;
  at::Tensor growth_tracker;
  at::Tensor counters;
  c10::ArrayRef<c10::IValue> found_infs;
  math::ScalePolicy policy;
  std::optional<at::Tensor> history;
  std::optional<at::Tensor> norm;

  math::ScaleMemory memory() const;
};

UpdateScaleArguments update_scale_arguments(const torch::jit::Stack& stack);

template <void (*kKernel)(const UpdateScaleArguments&)>
void boxed_update_scale(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  kKernel(update_scale_arguments(*stack));
  torch::jit::drop(*stack, op.schema().arguments().size());
}

/// Makes a function a backend's kernel.
template <void (*kKernel)(const UpdateScaleArguments&)>
void register_update_scale(torch::Library& library) {
  library.impl("update_scale",
               torch::CppFunction::makeFromBoxedFunction<&boxed_update_scale<kKernel>>());
}

}  // namespace ampfuse
