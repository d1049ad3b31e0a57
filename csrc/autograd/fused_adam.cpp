#include "../ops/registration.h"
#include "mutating.h"

namespace ampfuse {

AMPFUSE_KERNELS(Autograd, m) {
  m.impl("fused_adam", mutating_autograd());
  m.impl("fused_adam.write_back_grads", mutating_autograd());
}

AMPFUSE_KERNELS(ADInplaceOrView, m) {
  m.impl("fused_adam", mutating_version_bump());
  m.impl("fused_adam.write_back_grads", mutating_version_bump());
}

}  // namespace ampfuse
