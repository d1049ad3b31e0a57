// What comes before and after the rows of a cross-entropy: numbers of the whole call, by one block,
// in an order that is always the same.
#pragma once

#include "cross_entropy.cuh"

namespace ampfuse {

// A target that is no class, in memory that the host reads whenever it likes.
struct TargetComplaint {
  int64_t row;
  int64_t target;
  int is_set;
};

struct CrossEntropyScalars {
  const float* grad_scale;    // or null: 1
  const double* denominator;  // or null: what the targets weigh
  bool is_mean;
  float* baked;
  double* divisor;
  TargetComplaint* complaint;  // or null
  bool trap;                   // stop the device instead
};

template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    cross_entropy_prepare_kernel(const __grid_constant__ CrossEntropyTable<scalar_t> table,
                                 CrossEntropyScalars scalars) {
  AMPFUSE_SHARED(double, scratch, BlockTeam::kScratch);
  const BlockTeam team(scratch);
  constexpr double kNoRow = 9007199254740992.0;  // 2⁵³: rows are doubles here, exactly
  double weight = 0;
  double bad_row = kNoRow;
  if (table.target != nullptr) {
    for (int64_t row = team.index(); row < table.rows; row += BlockTeam::kSize) {
      if (table.is_ignored(row)) continue;
      const int64_t target = table.index(row);
      if (table.is_class(target)) {
        weight += table.weight_of(target);
      } else if (bad_row == kNoRow) {
        bad_row = static_cast<double>(row);
      }
    }
  }
  weight = team_sum(team, weight);
  bad_row = team.joined(bad_row, [](double a, double b) { return a < b ? a : b; });
  if (team.index() != 0) return;
  if (table.target == nullptr) weight = static_cast<double>(table.rows);
  const float scale = scalars.grad_scale == nullptr ? 1.0f : *scalars.grad_scale;
  *scalars.baked = math::is_finite(scale) && scale != 0 ? scale : 1.0f;
  const double denominator = scalars.denominator == nullptr ? weight : *scalars.denominator;
  *scalars.divisor = scalars.is_mean ? denominator : 1.0;
  if (bad_row == kNoRow) return;
  if (scalars.trap) __trap();
  if (scalars.complaint == nullptr) return;
  scalars.complaint->row = static_cast<int64_t>(bad_row);
  scalars.complaint->target = table.index(static_cast<int64_t>(bad_row));
  scalars.complaint->is_set = 1;
}

// `each`: the losses of rows as they are; else their sum, divided.
template <typename acc_t>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    cross_entropy_finish_kernel(const double* losses, int64_t rows, const double* divisor,
                                bool each, acc_t* loss) {
  AMPFUSE_SHARED(double, scratch, BlockTeam::kScratch);
  const BlockTeam team(scratch);
  double sum = 0;
  for (int64_t row = team.index(); row < rows; row += BlockTeam::kSize) {
    if (each) {
      loss[row] = static_cast<acc_t>(losses[row]);
    } else {
      sum += losses[row];
    }
  }
  if (each) return;
  sum = team_sum(team, sum);
  if (team.index() == 0) *loss = static_cast<acc_t>(sum / *divisor);
}

// A gradient for what backward got, from one for what it was expected to get: nothing where that is
// the same, else 2·itemsize bytes per logit.
template <typename scalar_t>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    cross_entropy_rescale_kernel(scalar_t* grad, int64_t stride, int64_t rows, int classes,
                                 const float* baked, const RowAcc<scalar_t>* grad_output) {
  const double expected = *baked;
  const double got = *grad_output;
  if (got == expected) return;
  const double factor = got / expected;
  const WarpTeam team(nullptr);
  for (int64_t row = team.number(); row < rows; row += WarpTeam::count()) {
    scalar_t* const out = grad + row * stride;
    visit_row<2>(team, out, classes, true, [&](int first, auto pack) {
#pragma unroll
      for (int e = 0; e < decltype(pack)::kSize; ++e) {
        const auto g = static_cast<RowAcc<scalar_t>>(pack.value[e]);
        pack.value[e] = static_cast<scalar_t>(static_cast<RowAcc<scalar_t>>(g * factor));
      }
      store_pack(out + first, pack);
    });
  }
}

}  // namespace ampfuse
