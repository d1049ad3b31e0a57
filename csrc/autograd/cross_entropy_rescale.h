// Rescales, in backward, the gradients that a loss computed in forward.
#pragma once

#include <ATen/core/Tensor.h>

namespace ampfuse {

/// Rescales `saved`, a gradient that forward multiplied by `baked_scale`, to the gradient for
/// `grad_output`, which backward received. May overwrite `saved`, but not if the graph is kept for
/// another backward.
at::Tensor rescaled(const at::Tensor& saved, const at::Tensor& baked_scale,
                    const at::Tensor& grad_output);

}  // namespace ampfuse
