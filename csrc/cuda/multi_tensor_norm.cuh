// Norms of a list of tensors in one read, in two launches whatever the list.
//
// First multi_tensor_norm_kernel, a warp per chunk, leaves one NormPartial each
// (math/multi_tensor_norm.h). Then multi_tensor_norm_finish_kernel, a block per tensor, makes its
// norm from its partials, and the last block to finish makes the total.
//
// Sums are taken in fp32 where elements have 32 bits or less; a chunk whose sum leaves the range in
// which that is exact enough is read again in double: overflows, underflows, and zeros.
#pragma once

#include "../math/multi_tensor_norm.h"
#include "multi_tensor.cuh"
#include "reduce.cuh"
#include "vectorized.cuh"

namespace ampfuse {

// Where a tensor's partials are. Written by whoever reads the tensor's first chunk, so the second
// launch needs no table.
struct NormRange {
  int64_t first;
  int64_t count;
};

// Column 0 holds the elements, column 1 the tensor's NormRange.
using NormTable = TensorTable<2, math::kNormChunk>;

// What sums of scalar_t are kept in: complex numbers count by their magnitude, a double.
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

// The norm of one chunk, from all lanes of a warp. `change` gets each element before it is counted;
// what it makes of it is stored with Access::kReadWrite. multi_tensor_unscale comes in there.
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
  __syncwarp();  // other lanes' stores are read now
  return math::norm_exact<kNorm>(
      size, [data](int64_t i) { return math::norm_part(data[i]); }, warp);
}

// Leaves a chunk's partial, and from the first chunk the tensor's range, for the second kernel.
__device__ __forceinline__ void store_partial(const NormTable& table, const TableChunk& at,
                                              int64_t slot, math::NormPartial partial,
                                              math::NormPartial* partials) {
  partials[slot] = partial;
  if (at.number == 0) *static_cast<NormRange*>(table.data[1][at.tensor]) = {slot, at.chunks};
}

// `slots_before`: partials of the launches before this one. `finished` is zeroed for the kernel
// that follows.
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

// What the second kernel reads, besides where it leaves the tensors' norms for its last block.
struct NormWorkspace {
  const math::NormPartial* partials;
  const NormRange* ranges;
  math::NormPartial* tensors;
  unsigned* finished;
};

template <typename out_t>
struct NormResults {
  out_t* total_norm;
  out_t* norms;
  float* found_inf;
  bool clear_found_inf;  // otherwise it is only ever set
  int64_t* first_nonfinite;
  int64_t* nonfinite_count;
};

template <math::NormType kNorm, typename out_t>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    multi_tensor_norm_finish_kernel(int64_t tensors, NormWorkspace workspace,
                                    NormResults<out_t> results) {
  AMPFUSE_SHARED(double, scratch, kWarpsPerBlock);
  AMPFUSE_SHARED(bool, is_last, 1);
  const BlockWorkers block(scratch);

  for (int64_t t = blockIdx.x; t < tensors; t += gridDim.x) {
    const NormRange range = workspace.ranges[t];
    const math::NormPartial* partials = workspace.partials + range.first;
    const math::NormPartial norm = math::norm_of_parts<kNorm>(
        range.count, [partials](int64_t i) { return partials[i]; }, block);
    if (threadIdx.x == 0) {
      workspace.tensors[t] = norm;
      results.norms[t] = static_cast<out_t>(norm.norm);
    }
  }

  // The last block sees what all wrote: each fenced its writes before it was counted.
  if (threadIdx.x == 0) {
    __threadfence();
    is_last[0] = atomicAdd(workspace.finished, 1u) == gridDim.x - 1;
  }
  __syncthreads();
  if (!is_last[0]) return;
  __threadfence();

  const volatile math::NormPartial* norms = workspace.tensors;  // not from a stale cache line
  const math::NormPartial total = math::norm_of_parts<kNorm>(
      tensors, [norms](int64_t i) { return math::NormPartial{norms[i].norm, norms[i].nonfinite}; },
      block);
  // Indices and counts are exact in a double. The first offender is the furthest from the end.
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
