#include "../ops/fused_adam.h"
#include "../ops/fused_sgd.h"
#include "../ops/fused_step_kernels.h"

namespace ampfuse {

namespace {

void fused_step_meta(const FusedStepArguments& arguments) {
  for (size_t t = 0; t < arguments.count(); ++t) check_step_tensor(arguments, t);
}

}  // namespace

AMPFUSE_KERNELS(Meta, m) {
  register_fused_step<fused_adam_arguments, fused_step_meta>(m, "fused_adam");
  register_fused_step<fused_sgd_arguments, fused_step_meta>(m, "fused_sgd");
}

}  // namespace ampfuse
