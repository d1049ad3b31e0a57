#include <torch/library.h>

#include "mutating.h"

namespace ampfuse {

TORCH_LIBRARY_IMPL(ampfuse, Autograd, m) {
  m.impl("update_scale", mutating_autograd());
}

TORCH_LIBRARY_IMPL(ampfuse, ADInplaceOrView, m) {
  m.impl("update_scale", mutating_version_bump());
}

}  // namespace ampfuse
