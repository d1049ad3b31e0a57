#include "../ops/registration.h"
#include "mutating.h"

namespace ampfuse {

AMPFUSE_KERNELS(Autograd, m) {
  m.impl("update_scale", mutating_autograd());
}

AMPFUSE_KERNELS(ADInplaceOrView, m) {
  m.impl("update_scale", mutating_version_bump());
}

}  // namespace ampfuse
