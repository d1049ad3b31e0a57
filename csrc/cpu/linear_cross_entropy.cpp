#include "../ops/linear_cross_entropy_kernels.h"

namespace ampfuse {

TORCH_LIBRARY_IMPL(ampfuse, CPU, m) {
  register_linear_cross_entropy<kByChunk<kCrossEntropyCpu, kClassShardsCpu>>(m);
}

}  // namespace ampfuse
