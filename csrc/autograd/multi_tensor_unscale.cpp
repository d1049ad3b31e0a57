#include "../ops/registration.h"
#include "mutating.h"

namespace ampfuse {

AMPFUSE_KERNELS(Autograd, m) {
  m.impl("multi_tensor_unscale", mutating_autograd());
  m.impl("multi_tensor_unscale_norm", mutating_autograd());
}

AMPFUSE_KERNELS(ADInplaceOrView, m) {
  m.impl("multi_tensor_unscale", mutating_version_bump());
  m.impl("multi_tensor_unscale_norm", mutating_version_bump());
}

}  // namespace ampfuse
