#include <torch/library.h>

#include "mutating.h"

namespace ampfuse {

TORCH_LIBRARY_IMPL(ampfuse, Autograd, m) {
  m.impl("fused_adam", mutating_autograd());
  m.impl("fused_adam.write_back_grads", mutating_autograd());
}

TORCH_LIBRARY_IMPL(ampfuse, ADInplaceOrView, m) {
  m.impl("fused_adam", mutating_version_bump());
  m.impl("fused_adam.write_back_grads", mutating_version_bump());
}

}  // namespace ampfuse
