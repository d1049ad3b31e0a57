// Norms of a list of tensors, in one read of memory and with two kernels.
//
// First multi_tensor_norm_kernel, a warp per chunk, writes one NormPartial per chunk
// (math/multi_tensor_norm.h). Then multi_tensor_norm_finish_kernel, a block per tensor, computes
// the norm of the tensor from its partials, and the last block to finish computes the total norm.
//
// Sums of elements of 32 bits or less are accumulated in fp32. If the sum of a chunk leaves the
// range in which fp32 is accurate enough (overflow, underflow, or zero), the chunk is read again
// and accumulated in double.
#pragma once

#include "../math/multi_tensor_norm.h"
#include "multi_tensor.cuh"
#include "reduce.cuh"
#include "vectorized.cuh"

namespace ampfuse {

// The range of a tensor's partials. The warp that reads the tensor's first chunk writes it, so the
// second kernel needs no table.
struct NormRange {
  int64_t first;
  int64_t count;
};

// Column 0 holds the elements, column 1 the tensor's NormRange.
using NormTable = TensorTable<2, math::kNormChunk>;

// The type in which sums over scalar_t are accumulated. Complex numbers enter a sum by their
// magnitude, a double.
template <typename scalar_t>
struct NormAccumulator {
  using type = float;
};
template <>
struct NormAccumulator<double> {
  using type = double;
};
template <typename T>
struct NormAccumulator<math::Complex<T>> {
  using type = double;
};

// Returns the norm of one chunk; all lanes of a warp must call it. `change(x)` may change each
// element before it enters the norm, and Access::kReadWrite stores the changed element
// (multi_tensor_unscale.cuh uses this).
template <math::NormType kNorm, Access kAccess, typename scalar_t, typename Change>
__device__ __forceinline__ math::NormPartial norm_chunk(scalar_t* data, int size, int lane,
                                                        Change change) {
  using acc_t = typename NormAccumulator<scalar_t>::type;
  const WarpWorkers warp;
  acc_t sum = 0;
  visit_elements<kAccess>(data, size, lane, [&](scalar_t& x) {
    change(x);
    sum = math::norm_accumulate<kNorm>(sum, math::norm_value<acc_t>(x));
  });
  const double total = warp.join<kNorm>(sum);
  if (math::norm_in_range<kNorm, scalar_t, acc_t>(total)) {
    return {math::norm_finish<kNorm>(total), 0};
  }
  __syncwarp();  // norm_exact reads what other lanes have stored
  return math::norm_exact<kNorm>(
      size, [data](int64_t i) { return math::norm_partial(data[i]); }, warp);
}

// Stores the partial of a chunk, and for the tensor's first chunk also the tensor's range.
__device__ __forceinline__ void store_partial(const NormTable& table, const TableChunk& at,
                                              int64_t slot, math::NormPartial partial,
                                              math::NormPartial* partials) {
  partials[slot] = partial;
  if (at.number == 0) *static_cast<NormRange*>(table.at(1, at.tensor)) = {slot, at.chunks};
}

// `slots_before` is the number of partials from earlier launches. `finished` is set to 0 for the
// finish kernel.
template <math::NormType kNorm, typename scalar_t>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    multi_tensor_norm_kernel(const __grid_constant__ NormTable table, int64_t slots_before,
                             math::NormPartial* partials, unsigned* finished) {
  if (blockIdx.x == 0 && threadIdx.x == 0) *finished = 0;
  for_each_chunk(table, [&](uint32_t chunk, const TableChunk& at, int lane) {
    const math::NormPartial partial = norm_chunk<kNorm, Access::kRead>(
        chunk_data<scalar_t>(table, 0, at), at.size, lane, [](scalar_t&) {});
    if (lane == 0) store_partial(table, at, slots_before + chunk, partial, partials);
  });
}

// The inputs of the finish kernel, and the memory through which its last block gets the norms.
struct NormWorkspace {
  const math::NormPartial* partials;
  const NormRange* ranges;
  math::NormPartial* norms;  // one per tensor
  unsigned* finished;
};

template <typename out_t>
struct NormResults {
  out_t* total_norm;
  out_t* norms;
  float* found_inf;
  bool clear_found_inf;  // if false, found_inf is only ever set to 1
  int64_t* first_nonfinite;
  int64_t* nonfinite_count;
};

template <math::NormType kNorm, typename out_t>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    multi_tensor_norm_finish_kernel(int64_t tensors, NormWorkspace workspace,
                                    NormResults<out_t> results) {
  AMPFUSE_SHARED(double, scratch, kWarpsPerBlock);
  const BlockWorkers block(scratch);

  for (int64_t t = blockIdx.x; t < tensors; t += gridDim.x) {
    const NormRange range = workspace.ranges[t];
    const math::NormPartial* partials = workspace.partials + range.first;
    const math::NormPartial norm = math::norm_of_partials<kNorm>(
        range.count, [partials](int64_t i) { return partials[i]; }, block);
    if (threadIdx.x == 0) {
      workspace.norms[t] = norm;
      results.norms[t] = static_cast<out_t>(norm.norm);
    }
  }

  if (!is_last_block(workspace.finished)) return;
  const volatile math::NormPartial* norms = workspace.norms;
  const math::NormPartial total = math::norm_of_partials<kNorm>(
      tensors, [norms](int64_t i) { return math::NormPartial{norms[i].norm, norms[i].nonfinite}; },
      block);
  // Indices and counts are exact in a double. The first non-finite tensor is the one furthest from
  // the end of the list.
  double furthest = 0;
  double count = 0;
  for (int64_t t = block.index(); t < tensors; t += block.count()) {
    if (!norms[t].nonfinite) continue;
    count += 1;
    if (furthest < double(tensors - t)) furthest = double(tensors - t);
  }
  furthest = block.join<math::NormType::kInf>(furthest);
  count = block.join<math::NormType::kL1>(count);
  if (threadIdx.x == 0) {
    *results.total_norm = static_cast<out_t>(total.norm);
    if (count > 0 || results.clear_found_inf) *results.found_inf = count > 0 ? 1.0f : 0.0f;
    *results.first_nonfinite = count > 0 ? tensors - static_cast<int64_t>(furthest) : -1;
    *results.nonfinite_count = static_cast<int64_t>(count);
  }
}

}  // namespace ampfuse
