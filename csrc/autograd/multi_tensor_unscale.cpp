#include <torch/library.h>

#include "mutating.h"

namespace ampfuse {

TORCH_LIBRARY_IMPL(ampfuse, Autograd, m) {
  m.impl("multi_tensor_unscale", mutating_autograd());
  m.impl("multi_tensor_unscale_norm", mutating_autograd());
}

TORCH_LIBRARY_IMPL(ampfuse, ADInplaceOrView, m) {
  m.impl("multi_tensor_unscale", mutating_version_bump());
  m.impl("multi_tensor_unscale_norm", mutating_version_bump());
}

}  // namespace ampfuse
