// Gradients from kernels that have no derivative, and tensors that kernels cannot read directly.
#pragma once

#include <ATen/core/Tensor.h>

namespace ampfuse {

/// Returns `grad` with a node of the autograd graph that throws if it is differentiated. The node
/// is connected to everything that the gradient depends on. Without it, the engine would treat the
/// gradient as a constant, and second derivatives would be wrong. Call this function in the
/// backward of an autograd function. `instead` names a function that can be differentiated twice.
at::Tensor once_differentiable(const char* op, const char* instead, const at::Tensor& grad,
                               const at::Tensor& grad_output);

/// True if the tensor is a batch of tensors in vmap.
bool is_batched(const at::Tensor& tensor);

/// True if the tensor is traced, or of a subclass, so that kernels do not read its own memory.
/// Modes that only observe calls do not count: such a mode may be active in forward, but not when
/// a checkpoint repeats forward.
bool is_traced_or_subclass(const at::Tensor& tensor);

}  // namespace ampfuse
