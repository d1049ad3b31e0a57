#include "../ops/multi_tensor_clip.h"

#include "../math/multi_tensor_clip.h"
#include "../ops/registration.h"
#include "../tensors/tensor_list.h"
#include "chunks.h"
#include "vec/multi_tensor_scale.h"

namespace ampfuse {

namespace {

void multi_tensor_clip_cpu(at::TensorList tensors, const at::Tensor& total_norm, double max_norm) {
  const DenseRuns dense("multi_tensor_clip", tensors, ComplexAs::kRealPairs, Use::kWrite);
  check_clip_norm(tensors, total_norm);
  const double factor = math::clip_factor(total_norm.item<double>(), max_norm);
  if (factor == 1) return;
  const auto scale_chunk = AMPFUSE_CHOOSE(scale_chunk);
  Chunks(dense.get()).parallel_for([&](const Chunk& chunk) {
    scale_chunk(chunk.dtype, chunk.data, chunk.size, factor);
  });
  dense.write_back();
}

}  // namespace

AMPFUSE_KERNELS(CPU, m) {
  m.impl("multi_tensor_clip", multi_tensor_clip_cpu);
}

}  // namespace ampfuse
