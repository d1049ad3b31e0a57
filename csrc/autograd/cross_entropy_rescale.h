// Rescales, in backward, the gradients that a loss computed in forward.
#pragma once

#include <ATen/core/Tensor.h>

namespace ampfuse {

/// Rescales a gradient that forward multiplied by `baked_scale` to the gradient for `grad_output`,
/// which backward received. This is all that backward does. `saved` is overwritten, unless the
/// graph is kept for another backward.
at::Tensor rescaled(const at::Tensor& saved, const at::Tensor& baked_scale,
                    const at::Tensor& grad_output);

}  // namespace ampfuse
