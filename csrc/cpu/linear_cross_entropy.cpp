#include "../ops/linear_cross_entropy_kernels.h"
#include "../ops/registration.h"

namespace ampfuse {

AMPFUSE_KERNELS(CPU, m) {
  register_linear_cross_entropy<kByChunk<kCrossEntropyCpu, kClassShardsCpu>>(m);
}

}  // namespace ampfuse
