#include "../ops/linear_cross_entropy_kernels.h"

namespace ampfuse {

TORCH_LIBRARY_IMPL(ampfuse, CUDA, m) {
  register_linear_cross_entropy<kByChunk<kCrossEntropyCuda, kClassShardsCuda>>(m);
}

}  // namespace ampfuse
