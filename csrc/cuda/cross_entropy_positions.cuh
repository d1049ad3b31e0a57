// Cross-entropy of a row whose classes are far apart in memory, for example the classes of a pixel.
// Each row belongs to one thread, and neighbouring threads have neighbouring positions, so a warp
// moves 32 consecutive elements of a class at a time. The passes are those of cross_entropy_row.cuh
// and cross_entropy_gradient.cuh.
#pragma once

#include "cross_entropy_gradient.cuh"

namespace ampfuse {

using PositionTeam = LaneTeam<1>;

// The packs of a row that are kept in shared memory. Packs of neighbouring threads are adjacent.
template <typename scalar_t>
struct KeptOfPosition {
  Pack<scalar_t>* packs;
  int count;

  __device__ Pack<scalar_t>& at(int p) const { return packs[p * PositionTeam::kBlock]; }
};

template <typename scalar_t>
__device__ __forceinline__ KeptOfPosition<scalar_t> kept_packs(const PositionTeam& team,
                                                               int count) {
  AMPFUSE_DYNAMIC_SHARED(uint4, shared);
  return {reinterpret_cast<Pack<scalar_t>*>(shared) + team.index_in_block(), count};
}

template <int kCount, typename scalar_t>
__device__ __forceinline__ Pack<scalar_t, kCount> gathered(const scalar_t* in, int64_t stride,
                                                           int first) {
  Pack<scalar_t, kCount> pack;
#pragma unroll
  for (int e = 0; e < kCount; ++e) pack.value[e] = in[(first + e) * stride];
  return pack;
}

template <RowWork kWork, typename scalar_t>
__device__ __forceinline__ RowSums<scalar_t> read_row(const PositionTeam& team,
                                                      const CrossEntropyTable<scalar_t>& table,
                                                      int64_t row, int target,
                                                      scalar_t target_logit, bool with_metrics,
                                                      const KeptOfPosition<scalar_t>& kept) {
  constexpr int kSize = Pack<scalar_t>::kSize;
  const scalar_t* const in = table.template logits_of<PositionTeam>(row);
  const int64_t stride = table.input_at.class_stride;
  const auto pass = [&](const auto& start, const auto& add) {
    start();
    int first = 0;
    for (; first + kSize <= table.classes; first += kSize) {
      add(first, gathered<kSize>(in, stride, first), [&](const Pack<scalar_t>& pack) {
        if (first / kSize < kept.count) kept.at(first / kSize) = pack;
      });
    }
#pragma unroll 1
    for (; first < table.classes; ++first)
      add(first, gathered<1>(in, stride, first), [](const auto&) {});
  };
  return row_sums<kWork>(team, table, table.template probabilities_of<PositionTeam>(row), target,
                         target_logit, with_metrics, pass);
}

template <typename scalar_t>
__device__ __forceinline__ void write_zeros(const PositionTeam&, scalar_t* row, const RowsAt& at,
                                            int classes) {
#pragma unroll 4
  for (int c = 0; c < classes; ++c) row[c * at.class_stride] = static_cast<scalar_t>(0.0f);
}

// The second pass over a row. No synchronisation is needed: each thread reads only packs that it
// kept itself and logits that it then overwrites itself.
template <RowWork kWork, typename scalar_t>
__device__ __forceinline__ void write_gradient(const PositionTeam&,
                                               const PackGradient<kWork, scalar_t>& gradient,
                                               const scalar_t* in, const RowsAt& in_at, int classes,
                                               const KeptOfPosition<scalar_t>& kept, scalar_t* out,
                                               const RowsAt& out_at) {
  constexpr int kSize = Pack<scalar_t>::kSize;
  const auto write = [&]<int kCount>(int first, const Pack<scalar_t, kCount>& result) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) out[(first + e) * out_at.class_stride] = result.value[e];
  };
  const auto from_logits = [&]<int kCount>(int first) {
    return gradient.template of<scalar_t>(first, gathered<kCount>(in, in_at.class_stride, first));
  };
  int first = 0;
  for (; first + kSize <= classes; first += kSize) {
    const int p = first / kSize;
    if (p < kept.count) {
      const Pack<scalar_t> pack = kept.at(p);
      write(first, gradient.template of_kept<scalar_t>(first, pack));
    } else {
      write(first, from_logits.template operator()<kSize>(first));
    }
  }
#pragma unroll 1
  for (; first < classes; ++first) write(first, from_logits.template operator()<1>(first));
}

}  // namespace ampfuse
