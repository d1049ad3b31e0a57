#include "../ops/registration.h"
#include "mutating.h"

namespace ampfuse {

AMPFUSE_KERNELS(Autograd, m) {
  m.impl("multi_tensor_clip", mutating_autograd());
}

AMPFUSE_KERNELS(ADInplaceOrView, m) {
  m.impl("multi_tensor_clip", mutating_version_bump());
}

}  // namespace ampfuse
