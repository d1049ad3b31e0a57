#include <torch/csrc/autograd/autograd_not_implemented_fallback.h>
#include <torch/library.h>

namespace ampfuse {

// A number for decisions, not for losses: backward through it raises.
TORCH_LIBRARY_IMPL(ampfuse, Autograd, m) {
  m.impl("multi_tensor_norm", torch::autograd::autogradNotImplementedFallback());
}

}  // namespace ampfuse
