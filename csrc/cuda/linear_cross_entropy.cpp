#include "../ops/linear_cross_entropy_kernels.h"

namespace ampfuse {

AMPFUSE_KERNELS(CUDA, m) {
  register_linear_cross_entropy<kByChunk<kCrossEntropyCuda, kVocabShardsCuda>>(m);
}

}  // namespace ampfuse
