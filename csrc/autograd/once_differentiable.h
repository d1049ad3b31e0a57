// Gradients from kernels that have no derivative, and tensors that kernels cannot read directly.
#pragma once

#include <ATen/core/Tensor.h>

namespace ampfuse {

/// Returns `grad`, with a history that makes differentiating it throw. The history leads to
/// everything that the gradient depends on. Without that the engine would not notice that a second
/// derivative is missing. Call this in the backward of a function. `instead` names a function that
/// can be differentiated twice.
at::Tensor once_differentiable(const char* op, const char* instead, const at::Tensor& grad,
                               const at::Tensor& grad_output);

/// True if the tensor is a batch of tensors in vmap.
bool is_batched(const at::Tensor& tensor);

/// True if the tensor stands for another one: it is traced, or a subclass. A compiled backward must
/// not write to memory of forward, which it would copy first. Modes that only observe do not count:
/// one may be active in forward and not when a checkpoint repeats it.
bool is_traced_or_subclass(const at::Tensor& tensor);

}  // namespace ampfuse
