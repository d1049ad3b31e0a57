// Backward of a cross-entropy: computes the gradient from the logits, or rescales the gradient that
// forward wrote.
#pragma once

#include "../math/cross_entropy_shards.h"
#include "cross_entropy_positions.cuh"

namespace ampfuse {

// Computes the gradient from the logits. This moves 2·itemsize bytes per logit, or 6 with a 16-bit
// gradient of float logits. `grad_output` has one number, or one per row if `is_per_row`.
template <typename scalar_t, typename Team, RowWork kWork, typename grad_t>
__global__ void __launch_bounds__(Team::kBlock, kRowBlocks<kWork, scalar_t, Team>)
    cross_entropy_backward_kernel(const __grid_constant__ CrossEntropyTable<scalar_t> table,
                                  const math::RowStatistics* statistics, const double* divisor,
                                  const double* grad_output, bool is_per_row, grad_t* grad,
                                  const __grid_constant__ RowsAt grad_at) {
  using Number = RowNumber<scalar_t>;
  const Team team(nullptr);
  RawIndex next_index = table.raw_index(team.number());  // as in cross_entropy_forward_kernel
  for (int64_t row = team.number(); row < table.rows; row += Team::count()) {
    const int64_t index = table.index(next_index);
    next_index = table.raw_index(row + Team::count());
    grad_t* const out = grad + grad_at.template offset<Team>(row);
    if (table.is_ignored(index)) {
      write_zeros(team, out, grad_at, table.classes);
      continue;
    }
    const int target_class = table.class_of(index);
    const auto scale = static_cast<Number>(grad_output[is_per_row ? row : 0] / *divisor);
    const Number mass = table.row_target(table.is_elsewhere(index), target_class, scalar_t{}).mass;
    const math::RowStatistics known =
        table.is_shard ? math::of_shard(statistics[row], mass) : statistics[row];
    const auto exponential =
        row_exponential<scalar_t>(static_cast<RowAcc<scalar_t>>(known.largest));
    const PackGradient<kWork, scalar_t> gradient(
        table, table.template probabilities_of<Team>(row), target_class,
        math::row_gradient(known, static_cast<Number>(exponential.reference()), mass, table.terms,
                           scale),
        exponential, 1);
    write_gradient(team, gradient, table.template logits_of<Team>(row), table.input_at,
                   table.classes, kept_packs<scalar_t>(team, 0), out, grad_at);
  }
}

// Multiplies the gradient that forward wrote by grad_output / baked_scale. If the two are equal,
// the gradient is not read; otherwise this moves 2·itemsize bytes per logit. A warp rescales
// `count` elements at each multiple of `stride` below `extent`: a row, or a chunk of a contiguous
// gradient.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    cross_entropy_rescale_kernel(scalar_t* grad, int64_t stride, int64_t extent, int count,
                                 const float* baked_scale, const RowAcc<scalar_t>* grad_output) {
  if (*grad_output == *baked_scale) return;
  const auto factor =
      static_cast<RowNumber<scalar_t>>(static_cast<double>(*grad_output) / *baked_scale);
  const auto scaled = [&](scalar_t g) {
    using acc_t = RowAcc<scalar_t>;
    return static_cast<scalar_t>(static_cast<acc_t>(static_cast<acc_t>(g) * factor));
  };
  const WarpTeam team(nullptr);
  const scalar_t* const end = grad + extent;
  for (grad += team.number() * stride; grad < end; grad += WarpTeam::count() * stride) {
    const int here = end - grad < count ? static_cast<int>(end - grad) : count;
    visit_elements<Access::kReadWrite>(grad, here, team.index(),
                                       [&](scalar_t& g) { g = scaled(g); });
  }
}

}  // namespace ampfuse
