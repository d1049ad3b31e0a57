#pragma once

#include <ATen/core/Tensor.h>
#include <ATen/core/stack.h>

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

/// The arguments on top of the stack, checked.
UpdateScaleArguments update_scale_arguments(const c10::FunctionSchema& schema,
                                            const torch::jit::Stack& stack);

/// The CUDA kernel.
void update_scale_cuda(const UpdateScaleArguments& arguments);

}  // namespace ampfuse
