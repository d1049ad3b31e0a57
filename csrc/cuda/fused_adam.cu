#include "../ops/fused_adam.h"
#include "fused_step_launch.h"

namespace ampfuse {

void fused_adam_cuda(const FusedAdamArguments& arguments) {
  fused_step_cuda(arguments);
}

}  // namespace ampfuse
