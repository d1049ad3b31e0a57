// Cross-entropy of rows whose classes are split over several ranks. One kernel computes the partial
// sums of this rank's classes, the other combines the partial sums of all ranks.
//
// Bytes of device memory: itemsize per logit and 88 per row for the first kernel, 88 per row and
// rank for the second. Rows whose largest logit is far from the reference are read twice.
#pragma once

#include "../math/cross_entropy_shards.h"
#include "cross_entropy_row.cuh"

namespace ampfuse {

// Computes the partial sums of each row; one team per row.
template <typename scalar_t, typename Team, RowWork kWork>
__global__ void __launch_bounds__(Team::kBlock, kRowBlocks<kWork, scalar_t, Team>)
    cross_entropy_shards_reduce_kernel(const __grid_constant__ CrossEntropyTable<scalar_t> table,
                                       math::ShardPartial* partials, int64_t* argmax) {
  AMPFUSE_SHARED(double, scratch, Team::kBlock / kWarp);
  const Team team(scratch);
  const auto nothing_kept = kept_packs<scalar_t>(team, 0);
  const bool with_metrics = kWork == RowWork::kGeneral && argmax != nullptr;
  const bool is_first = team.index() == 0;
  RawIndex next_index = table.raw_index(team.number());  // as in cross_entropy_forward_kernel
  for (int64_t row = team.number(); row < table.rows; row += Team::count()) {
    const int64_t index = table.index(next_index);
    next_index = table.raw_index(row + Team::count());
    const bool is_ignored = table.is_ignored(index);
    if (is_ignored && !with_metrics) continue;
    const int target_class = table.class_of(index);
    // Without a target here, the row's first logit is the reference of its exponentials.
    const int near = target_class < 0 && table.classes > 0 ? 0 : target_class;
    const scalar_t near_logit = table.template logit<Team>(row, near);
    const RowSums<scalar_t> sums =
        read_row<kWork>(team, table, row, target_class, near_logit, with_metrics, nothing_kept);
    if (is_first) {
      const bool is_absent = is_ignored || table.is_elsewhere(index);
      partials[row] =
          math::shard_partial(sums.partial, table.row_target(is_absent, target_class, near_logit),
                              table.classes, with_metrics);
    }
    if (with_metrics && is_first) argmax[row] = sums.argmax;
  }
}

// The results of rows over the classes of all ranks; null if not asked for.
template <typename acc_t>
struct JoinedResults {
  double* loss;
  math::RowStatistics* statistics;
  acc_t* lse;
  acc_t* entropy;
  int64_t* argmax;
};

// Combines the partial sums of all ranks; one thread per row.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads) cross_entropy_shards_join_kernel(
    const __grid_constant__ CrossEntropyTable<scalar_t> table, const math::ShardPartial* partials,
    int shards, int64_t all_classes,
    const __grid_constant__ JoinedResults<RowAcc<scalar_t>> results) {
  using acc_t = RowAcc<scalar_t>;
  for (int64_t row = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; row < table.rows;
       row += int64_t{gridDim.x} * blockDim.x) {
    const int64_t index = table.index(row);
    const math::JoinedRow known =
        math::joined_row(partials + row, table.rows, shards, all_classes, table.target != nullptr,
                         table.is_ignored(index), table.terms);
    results.loss[row] = known.loss;
    if (results.statistics != nullptr) results.statistics[row] = known.statistics;
    if (results.argmax == nullptr) continue;
    results.lse[row] = static_cast<acc_t>(known.lse);
    results.entropy[row] = static_cast<acc_t>(known.entropy);
    results.argmax[row] = known.argmax;
  }
}

}  // namespace ampfuse
