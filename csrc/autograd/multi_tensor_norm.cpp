#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include "../ops/registration.h"

namespace ampfuse {

// The norm is for decisions, not for losses: backward through it throws.
AMPFUSE_KERNELS(Autograd, m) {
  m.impl("multi_tensor_norm", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace ampfuse
