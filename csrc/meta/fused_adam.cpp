#include "../ops/fused_adam_kernels.h"

namespace ampfuse {

namespace {

void fused_adam_meta(const FusedAdamArguments& arguments) {
  for (size_t t = 0; t < arguments.count(); ++t) check_adam_tensor(arguments, t);
}

}  // namespace

AMPFUSE_KERNELS(Meta, m) {
  register_fused_adam<fused_adam_meta>(m);
}

}  // namespace ampfuse
