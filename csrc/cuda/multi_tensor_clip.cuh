// Multiplies a list of tensors by the clip factor. Every thread computes the factor from the norm
// on the device; one division per thread is cheap compared with a memory access per element. If the
// factor is 1, the tensors are not read or written.
#pragma once

#include "../math/multi_tensor_clip.h"
#include "multi_tensor_unscale.cuh"

namespace ampfuse {

template <typename scalar_t, typename norm_t>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    multi_tensor_clip_kernel(const __grid_constant__ ElementwiseTable table,
                             const norm_t* total_norm, double max_norm) {
  using acc_t = typename ScaleType<scalar_t>::type;
  const acc_t factor = static_cast<acc_t>(math::clip_factor(*total_norm, max_norm));
  if (factor == 1) return;
  for_each_chunk(table, [&](uint32_t, const TableChunk& at, int lane) {
    visit_elements<Access::kReadWrite>(chunk_data<scalar_t>(table, 0, at), at.size, lane,
                                       [factor](scalar_t& x) { x = math::scaled(x, factor); });
  });
}

}  // namespace ampfuse
