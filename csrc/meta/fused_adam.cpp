#include "../ops/fused_adam.h"
#include "../ops/registration.h"

namespace ampfuse {

namespace {

void fused_adam_meta(const FusedAdamArguments& arguments) {
  for (size_t t = 0; t < arguments.count(); ++t) check_adam_tensor(arguments, t);
}

}  // namespace

AMPFUSE_KERNELS(Meta, m) {
  for (const char* overload : kFusedAdamOverloads) {
    m.impl(overload, stack_kernel<fused_adam_arguments, fused_adam_meta>());
  }
}

}  // namespace ampfuse
