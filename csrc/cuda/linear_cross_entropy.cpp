#include "../ops/linear_cross_entropy_kernels.h"
#include "../ops/registration.h"

namespace ampfuse {

AMPFUSE_KERNELS(CUDA, m) {
  register_linear_cross_entropy<kByChunk<kCrossEntropyCuda, kClassShardsCuda>>(m);
}

}  // namespace ampfuse
