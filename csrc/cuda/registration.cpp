// Registers the CUDA kernels with torch's dispatcher. This is a separate file because nvcc reads a
// .cu twice, and once more for each architecture: torch/library.h would add 17 s to every .cu.
#include "../ops/registration.h"

#include "../ops/cross_entropy_kernels.h"
#include "../ops/fused_adam.h"
#include "../ops/fused_sgd.h"
#include "../ops/fused_step_kernels.h"
#include "../ops/linear_cross_entropy_kernels.h"
#include "../ops/multi_tensor_clip.h"
#include "../ops/multi_tensor_unscale.h"
#include "../ops/update_scale.h"

namespace ampfuse {

AMPFUSE_KERNELS(CUDA, m) {
  register_cross_entropy<kCrossEntropyCuda>(m);
  register_fused_step<fused_adam_arguments, fused_adam_cuda>(m, "fused_adam");
  register_fused_step<fused_sgd_arguments, fused_sgd_cuda>(m, "fused_sgd");
  register_linear_cross_entropy<kByChunk<kCrossEntropyCuda, kVocabShardsCuda>>(m);
  m.impl("multi_tensor_clip", multi_tensor_clip_cuda);
  m.impl("multi_tensor_norm", multi_tensor_norm_cuda);
  m.impl("multi_tensor_unscale", multi_tensor_unscale_cuda);
  m.impl("multi_tensor_unscale_norm", multi_tensor_unscale_norm_cuda);
  m.impl("update_scale",
         kernel_by_name<with_arguments<update_scale_arguments, update_scale_cuda>>());
}

}  // namespace ampfuse
