// Multiplies a list of tensors by a number on the device and flags what is not finite afterwards;
// with or without the norms of what was written. A warp per chunk. At inv_scale 1 the kernels read
// only.
#pragma once

#include "../math/multi_tensor_unscale.h"
#include "multi_tensor_norm.cuh"

namespace ampfuse {

using UnscaleTable = TensorTable<1, math::kNormChunk>;

// What products are computed in: fp32 for 16-bit types, else the type itself.
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
    multi_tensor_unscale_kernel(const __grid_constant__ UnscaleTable table, const float* inv_scale,
                                float* found_inf) {
  using acc_t = typename ScaleType<scalar_t>::type;
  const acc_t factor = *inv_scale;
  for_each_chunk(table, [&](uint32_t, const TableChunk& at, int lane) {
    scalar_t* const data = chunk_data<scalar_t>(table, 0, at);
    acc_t mark = 0;
    const auto look = [&](scalar_t x) { mark = math::mark_nonfinite(mark, static_cast<acc_t>(x)); };
    if (factor == 1) {
      visit_elements<Access::kRead>(data, at.size, lane, look);
    } else {
      visit_elements<Access::kReadWrite>(data, at.size, lane, [&](scalar_t& x) {
        x = math::scaled(x, factor);
        look(x);
      });
    }
    // Atomic only because several warps may store at once.
    if (__any_sync(0xffffffffu, mark != 0) && lane == 0) atomicExch(found_inf, 1.0f);
  });
}

// The first of the two kernels of multi_tensor_norm, on what it writes.
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
