// Multiplies a list of tensors by inv_scale, a number on the device, and sets a flag if a result is
// not finite. The second kernel also computes the norms of the results. A warp takes a chunk at a
// time. If inv_scale is 1, the kernels write no elements.
#pragma once

#include "../math/multi_tensor_unscale.h"
#include "multi_tensor_norm.cuh"

namespace ampfuse {

using ElementwiseTable = TensorTable<1, math::kNormChunk>;

// The type in which products are computed: double for double elements, otherwise fp32. Complex
// elements count as their real type.
template <typename scalar_t>
struct ScaleType {
  using type = float;
};
template <>
struct ScaleType<double> {
  using type = double;
};
template <>
struct ScaleType<math::Complex<double>> {
  using type = double;
};

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    multi_tensor_unscale_kernel(const __grid_constant__ ElementwiseTable table,
                                const float* inv_scale, float* found_inf) {
  using acc_t = typename ScaleType<scalar_t>::type;
  const acc_t factor = *inv_scale;
  for_each_chunk(table, [&](uint32_t, const TableChunk& at, int lane) {
    scalar_t* const data = chunk_data<scalar_t>(table, 0, at);
    acc_t mark = 0;
    const auto inspect = [&](scalar_t x) {
      mark = math::mark_nonfinite(mark, static_cast<acc_t>(x));
    };
    if (factor == 1) {
      visit_elements<Access::kRead>(data, at.size, lane, inspect);
    } else {
      visit_elements<Access::kReadWrite>(data, at.size, lane, [&](scalar_t& x) {
        x = math::scaled(x, factor);
        inspect(x);
      });
    }
    // The store is atomic only because several warps may store at once.
    if (__any_sync(0xffffffffu, mark != 0) && lane == 0) atomicExch(found_inf, 1.0f);
  });
}

// Unscales the elements and computes the NormPartial of each chunk from the results. It replaces
// multi_tensor_norm_kernel; multi_tensor_norm_finish_kernel runs after it.
template <math::NormType kNorm, typename scalar_t>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    multi_tensor_unscale_norm_kernel(const __grid_constant__ NormTable table,
                                     const float* inv_scale, int64_t slots_before,
                                     math::NormPartial* partials, unsigned* finished) {
  using acc_t = typename ScaleType<scalar_t>::type;
  const acc_t factor = *inv_scale;
  if (blockIdx.x == 0 && threadIdx.x == 0) *finished = 0;
  for_each_chunk(table, [&](uint32_t chunk, const TableChunk& at, int lane) {
    scalar_t* const data = chunk_data<scalar_t>(table, 0, at);
    const math::NormPartial partial =
        factor == 1
            ? norm_chunk<kNorm, Access::kRead>(data, at.size, lane, [](scalar_t&) {})
            : norm_chunk<kNorm, Access::kReadWrite>(
                  data, at.size, lane, [factor](scalar_t& x) { x = math::scaled(x, factor); });
    if (lane == 0) store_partial(table, at, slots_before + chunk, partial, partials);
  });
}

}  // namespace ampfuse
