// Gradients that a loss forms in its forward, where its logits are at hand.
#pragma once

#include <ATen/core/Tensor.h>

namespace ampfuse {

/// Of a gradient of the loss times `baked`, which backward was expected to be called with, what it
/// is called with makes: all there is to do in backward. A graph that is kept may be gone through
/// again, so that its gradient stays what it is.
at::Tensor rescaled(const at::Tensor& saved, const at::Tensor& baked,
                    const at::Tensor& grad_output);

}  // namespace ampfuse
