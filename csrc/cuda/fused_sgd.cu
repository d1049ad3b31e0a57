#include "../ops/fused_sgd.h"
#include "fused_step_launch.h"

namespace ampfuse {

void fused_sgd_cuda(const FusedSgdArguments& arguments) {
  fused_step_cuda(arguments);
}

}  // namespace ampfuse
