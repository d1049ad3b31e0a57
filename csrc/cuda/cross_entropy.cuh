// Cross-entropy of rows of logits and, from the same read of memory, its gradient.
//
// First cross_entropy_weigh_kernel validates the targets and sums their weights. A mean is divided
// by this sum, so it must be known before a gradient is written.
// Then cross_entropy_forward_kernel, a team of threads per row, makes one pass for the loss; with
// kPlain it repeats this pass if the target is far below the row's largest logit. For the gradient
// it makes a pass over the logits, from registers (cross_entropy_held.cuh), shared memory, or the
// L2 cache. The last block to finish adds up the losses of all blocks, in a fixed order.
//
// Bytes of device memory per logit: forward with gradient 2·itemsize (4 for 16-bit logits), or 6
// for a 16-bit gradient of float logits; forward without gradient itemsize;
// cross_entropy_backward_kernel as much as forward with gradient. Each row adds 8 bytes for its
// target, and 32 bytes of RowStatistics if backward computes the gradient.
//
// If the classes of a row are far apart in memory, one thread processes the row
// (cross_entropy_positions.cuh).
//
// The byte counts above hold if the L2 cache can hold the logits that rows in flight do not keep in
// registers or shared memory (cross_entropy_teams.cuh). Otherwise these logits are read once more,
// which adds itemsize·(1 − kept / row) bytes per logit.
#pragma once

#include "cross_entropy_held.cuh"
#include "cross_entropy_positions.cuh"

namespace ampfuse {

// Sums the weights of the targets and finds the first target out of range, per block. The
// assignment of rows to blocks is fixed. `finished` is set to 0 for the forward kernel.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    cross_entropy_weigh_kernel(const __grid_constant__ CrossEntropyTable<scalar_t> table,
                               TargetWeight* weights, unsigned* finished) {
  using Team = BlockTeam<kThreads>;
  AMPFUSE_SHARED(double, scratch, Team::kWarps);
  const Team team(scratch);
  if (blockIdx.x == 0 && threadIdx.x == 0) *finished = 0;
  double weight = 0;
  int64_t bad_row = table.rows;
  for (int64_t row = team.number() * Team::kSize + team.index(); row < table.rows;
       row += Team::count() * Team::kSize) {
    const int64_t target = table.index(row);
    if (target == table.ignore_index) continue;
    if (table.is_class(target)) {
      weight += table.weight_of(target);
    } else if (row < bad_row) {
      bad_row = row;
    }
  }
  weight = team_sum(team, weight);
  // A double holds a row's index exactly.
  bad_row = static_cast<int64_t>(team_smallest(team, static_cast<double>(bad_row)));
  if (team.index() == 0) weights[team.number()] = {weight, bad_row};
}

// Returns the factor of gradients, baked_scale / divisor. Every block sums the same numbers in the
// same order. The first block writes baked_scale and divisor, and reports a target out of range.
template <typename Block, typename scalar_t>
__device__ __forceinline__ double reduction_scale(const Block& block,
                                                  const CrossEntropyTable<scalar_t>& table,
                                                  const CrossEntropyReduction& reduction) {
  TargetWeight mine = {0, table.rows};
#pragma unroll 1  // no block takes more than a few turns
  for (int i = block.index(); i < reduction.weight_blocks; i += Block::kSize) {
    const TargetWeight other = reduction.weights[i];
    mine = {mine.weight + other.weight, min(mine.bad_row, other.bad_row)};
  }
  double weight = team_sum(block, mine.weight);
  if (reduction.weights == nullptr) weight = static_cast<double>(table.rows);
  if (reduction.denominator != nullptr) weight = *reduction.denominator;
  const double divisor = reduction.is_mean ? weight : 1.0;
  const float baked_scale =
      reduction.grad_scale == nullptr
          ? 1.0f
          : math::baked_scale(*reduction.grad_scale, divisor, reduction.limit);
  if (blockIdx.x == 0) {
    const auto bad_row =
        static_cast<int64_t>(team_smallest(block, static_cast<double>(mine.bad_row)));
    if (block.index() == 0) {
      if (reduction.baked_scale != nullptr) *reduction.baked_scale = baked_scale;
      *reduction.divisor = divisor;
      if (bad_row < table.rows) {
        if (reduction.trap) __trap();
        reduction.bad_target->row = bad_row;
        reduction.bad_target->target = table.index(bad_row);
        __threadfence_system();  // the host may read is_set at any time
        reduction.bad_target->is_set = 1;
      }
    }
  }
  return baked_scale / divisor;
}

// Writes the total weight of the targets of all rows to reduction.divisor, for callers that then
// process the rows in chunks.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    cross_entropy_total_kernel(const __grid_constant__ CrossEntropyTable<scalar_t> table,
                               const __grid_constant__ CrossEntropyReduction reduction) {
  AMPFUSE_SHARED(double, scratch, BlockTeam<kThreads>::kWarps);
  reduction_scale(BlockTeam<kThreads>(scratch), table, reduction);
}

// Writes the sum of the blocks' losses, divided by the divisor, from the last block to finish.
template <typename Block, typename acc_t>
__device__ __forceinline__ void reduce_losses(const Block& block, double losses,
                                              const volatile double* divisor,
                                              const ReducedLoss<acc_t>& reduced) {
  losses = team_sum(block, losses);
  if (block.index() == 0) reduced.of_blocks[blockIdx.x] = losses;
  if (!is_last_block(reduced.finished)) return;
  const volatile double* of_blocks = reduced.of_blocks;
  double sum = 0;
#pragma unroll 8  // up to 37 turns in blocks of 64 threads: eight loads are in flight
  for (unsigned i = block.index(); i < gridDim.x; i += Block::kSize) sum += of_blocks[i];
  sum = team_sum(block, sum);
  if (block.index() == 0) {
    *reduced.loss = static_cast<acc_t>(math::reduced_loss(sum, *divisor));
  }
}

// `kept_count`: number of packs of each row that fit in shared memory, a multiple of the team size.
// 0 if no gradient is wanted; otherwise, if the row is held, all fit.
template <typename scalar_t, typename Team, RowWork kWork, typename grad_t>
__global__ void __launch_bounds__(Team::kBlock, kRowBlocks<kWork, scalar_t, Team>)
    cross_entropy_forward_kernel(
        const __grid_constant__ CrossEntropyTable<scalar_t> table,
        const __grid_constant__ CrossEntropyReduction reduction,
        const __grid_constant__ CrossEntropyResults<scalar_t, grad_t> results, int kept_count) {
  using Number = RowNumber<scalar_t>;
  using Block = BlockTeam<Team::kBlock>;
  AMPFUSE_SHARED(double, scratch, Block::kWarps);
  const Block block(scratch);
  // The scale is in shared memory, since threads have no register for it while they read a row.
  AMPFUSE_SHARED(Number, scale, 1);
  const double factor = reduction_scale(block, table, reduction);
  if (block.index() == 0) *scale = static_cast<Number>(factor);
  block.sync();
  const Team team(scratch);
  auto kept = kept_row<kWork, scalar_t>(team, kept_count);
  const bool with_metrics = kWork == RowWork::kGeneral && results.argmax != nullptr;
  const bool is_first = team.index() == 0;
  double losses = 0;
  // The index of the next row's target is requested while this row is processed. Otherwise each row
  // would begin by waiting for it.
  RawIndex next_index = table.raw_index(team.number());
  for (int64_t row = team.number(); row < table.rows; row += Team::count()) {
    const int64_t index = table.index(next_index);
    next_index = table.raw_index(row + Team::count());
    const bool is_ignored = table.is_ignored(index);
    if (is_ignored) {
      if (is_first && results.row_losses != nullptr) results.row_losses[row] = 0;
      if (is_first && results.statistics != nullptr) results.statistics[row] = {};
      if (results.grad != nullptr && !with_metrics) {
        write_zeros(team, results.template grad_of<Team>(row), results.grad_at, table.classes);
      }
      if (!with_metrics) continue;
    }
    const int target_class = table.class_of(index);
    // The target's logit is requested together with the row. kGeneral has no register to hold it,
    // and requests it after the row was read, when it is still in a cache.
    scalar_t target_logit{};
    if (kWork != RowWork::kGeneral) target_logit = table.template logit<Team>(row, target_class);
    const RowSums<scalar_t> sums =
        read_row<kWork>(team, table, row, target_class, target_logit, with_metrics, kept);
    if (kWork == RowWork::kGeneral) target_logit = table.template logit<Team>(row, target_class);
    const math::RowTarget<Number> target = table.row_target(is_ignored, target_class, target_logit);
    const auto at_largest =
        row_exponential<scalar_t>(static_cast<RowAcc<scalar_t>>(sums.partial.largest));
    const auto below = static_cast<Number>(at_largest.below(target.z));
    math::RowLoss<Number> loss = {};
    if constexpr (kWork == RowWork::kHeldTwice) {
      // Only the first thread takes the logarithms of the loss.
      loss.statistics = math::row_statistics(sums.partial, math::target_exponential(target, below));
      if (is_first) loss.loss = math::row_loss(sums.partial, target, below, table.terms).loss;
    } else {
      loss = math::row_loss(sums.partial, target, below, table.terms);
    }
    if (with_metrics && is_first) {
      results.lse[row] = static_cast<RowAcc<scalar_t>>(loss.lse);
      results.entropy[row] = static_cast<RowAcc<scalar_t>>(loss.entropy);
      results.argmax[row] = sums.argmax;
    }
    if (is_first && !is_ignored) {
      losses += loss.loss;
      if (results.statistics != nullptr) results.statistics[row] = loss.statistics;
      if (results.row_losses != nullptr) {
        results.row_losses[row] = static_cast<RowAcc<scalar_t>>(loss.loss);
      }
    }
    if (results.grad == nullptr) continue;
    // The gradient may overwrite the logits, so wait until all threads have read the target's logit
    // and kept their packs. Threads of a block that holds its row have waited for each other
    // already, for the row's sum.
    if constexpr (!is_held(kWork) || Team::kSize <= kWarp) team.sync();
    grad_t* const grad = results.template grad_of<Team>(row);
    if (is_ignored) {
      write_zeros(team, grad, results.grad_at, table.classes);
    } else {
      // A held row is kept in registers, but its arithmetic is that of kPlain.
      constexpr RowWork kArithmetic = is_held(kWork) ? RowWork::kPlain : kWork;
      const PackGradient<kArithmetic, scalar_t> gradient(
          table, table.template probabilities_of<Team>(row), target_class,
          math::row_gradient(loss.statistics, sums.partial.reference, target.mass, table.terms,
                             *scale),
          sums.exponential, sums.factor);
      write_gradient(team, gradient, table.template logits_of<Team>(row), table.input_at,
                     table.classes, kept, grad, results.grad_at);
    }
  }
  if (results.reduced.loss != nullptr) {
    reduce_losses(block, losses, reduction.divisor, results.reduced);
  }
}

}  // namespace ampfuse
