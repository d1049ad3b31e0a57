// Gradients that come from kernels without derivatives, and tensors that kernels do not see.
#pragma once

#include <ATen/core/Tensor.h>

namespace ampfuse {

/// Refuses to differentiate once more what it returns, whose history leads to all that it depends
/// on: of what leads nowhere that is asked for, the engine would not notice that it cannot be had.
/// To be called in the backward of a function. `instead`: what can be differentiated twice.
at::Tensor once_differentiable(const char* op, const char* instead, const at::Tensor& grad,
                               const at::Tensor& grad_output);

/// Whether these are many tensors at once, as in vmap.
bool is_batched(const at::Tensor& tensor);

/// Whether it stands for others, above all while a program is traced. A compiled backward may not
/// be given memory of forward's to write to: it would copy it. Modes that only look on, and may be
/// there in forward and gone when a checkpoint repeats it, change nothing.
bool stands_for_others(const at::Tensor& tensor);

}  // namespace ampfuse
