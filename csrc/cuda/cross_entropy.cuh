// Cross-entropy of rows of logits and, with the same read from memory, its gradient.
//
// cross_entropy_prepare_kernel, one block: what the sum of losses is divided by and what gradients
// are multiplied by, which the rows need before they can write any; looks for targets that are no
// classes.
// cross_entropy_forward_kernel, a team per row: a pass for the loss, a second one, which finds the
// row in a cache, for the gradient.
// cross_entropy_finish_kernel, one block: adds up the losses in the order of rows.
//
// Bytes of device memory per logit: forward with gradient 2·itemsize, 4 for 16-bit logits; without
// it itemsize; cross_entropy_backward_kernel 2·itemsize more.
#pragma once

#include "cross_entropy_rows.cuh"

namespace ampfuse {

enum class IndexType { kLong, kInt, kByte };

// A call's arguments. Rows are int64_t, classes of a row int: the launcher refuses 2³¹ of them.
template <typename scalar_t>
struct CrossEntropyTable {
  const scalar_t* input;
  int64_t row_stride;
  int64_t rows;
  int classes;
  const void* target;  // indices, or null where there are probabilities
  IndexType index_type;
  int64_t ignore_index;
  const RowAcc<scalar_t>* weight;         // or null
  const RowAcc<scalar_t>* probabilities;  // or null
  int64_t probability_stride;
  double label_smoothing;
  double z_loss;
  double softcap;  // 0: none

  __device__ int64_t index(int64_t row) const {
    switch (index_type) {
      case IndexType::kLong:
        return static_cast<const int64_t*>(target)[row];
      case IndexType::kInt:
        return static_cast<const int32_t*>(target)[row];
      default:
        return static_cast<const uint8_t*>(target)[row];
    }
  }
  __device__ bool is_class(int64_t index) const { return index >= 0 && index < classes; }
  __device__ bool is_ignored(int64_t row) const {
    return target != nullptr && index(row) == ignore_index;
  }
  __device__ double weight_of(int64_t index) const {
    return weight == nullptr ? 1.0 : static_cast<double>(weight[index]);
  }
  __device__ double uniform() const { return label_smoothing / classes; }

  // B of a class that is not the row's own target.
  __device__ double share(int64_t row, int c) const {
    double share = uniform();
    if (probabilities != nullptr) {
      share += (1 - label_smoothing) * probabilities[row * probability_stride + c];
    }
    return share * weight_of(c);
  }

  __device__ RowAcc<scalar_t> z(scalar_t logit) const {
    const auto x = static_cast<RowAcc<scalar_t>>(logit);
    if (softcap == 0) return x;
    return static_cast<RowAcc<scalar_t>>(math::softcapped(x, softcap));
  }

  // A target that is no class makes its row no number.
  __device__ math::RowTarget row_target(int64_t row) const {
    if (target == nullptr || is_ignored(row)) return {};
    const int64_t at = index(row);
    if (!is_class(at)) return {true, NAN, NAN};
    return {true,
            math::softcapped(
                static_cast<double>(static_cast<RowAcc<scalar_t>>(input[row * row_stride + at])),
                softcap),
            weight_of(at) * (1 - label_smoothing + uniform())};
  }
  // Or -1.
  __device__ int target_class(int64_t row) const {
    const int64_t at = target == nullptr || is_ignored(row) ? -1 : index(row);
    return is_class(at) ? static_cast<int>(at) : -1;
  }
};

// What a call leaves; null where it is not asked for.
template <typename scalar_t>
struct CrossEntropyResults {
  double* losses;  // of rows
  math::RowStatistics* statistics;
  scalar_t* grad;
  int64_t grad_stride;
  RowAcc<scalar_t>* lse;
  RowAcc<scalar_t>* entropy;
  int64_t* argmax;
  const double* divisor;
  const float* baked;
};

// What a thread has seen of a row, relative to its own largest z.
template <typename scalar_t>
struct ThreadPart {
  using acc_t = RowAcc<scalar_t>;
  acc_t largest = -HUGE_VALF;
  double sum = 0;       // of exponentials, biased
  double sum_z = 0;     // of exponentials times z
  double shares = 0;    // of B
  double shares_z = 0;  // of B times z
  acc_t best = -HUGE_VALF;
  int best_class = 0;

  // A higher reference for what was summed up already.
  __device__ void raise(acc_t to) {
    if (sum != 0) {
      const double factor = std::exp(RowExponential<scalar_t>(largest).reference() -
                                     RowExponential<scalar_t>(to).reference());
      sum *= factor;
      sum_z *= factor;
    }
    largest = to;
  }
};

// Whether passes need no more than exponentials: no shares but the target's, no softcap and no
// metrics, which cost registers.
enum class RowWork { kPlain, kAny };

// Packs that a thread has on their way: 64 bytes for blocks. Warps of short rows have no more than
// a few, and what needs registers for its arithmetic does with one.
template <RowWork kWork, typename Team, typename scalar_t>
inline constexpr int kRowUnroll = kWork == RowWork::kAny || std::is_same_v<scalar_t, double> ? 1
                                  : std::is_same_v<Team, WarpTeam>                           ? 2
                                                                                             : 4;

// And 128 registers instead of 64.
template <RowWork kWork, typename scalar_t>
inline constexpr int kRowBlocks =
    kWork == RowWork::kAny || std::is_same_v<scalar_t, double> ? 2 : kBlocksPerMultiprocessor;

template <RowWork kWork, int kCount, typename scalar_t>
__device__ __forceinline__ void add_pack(const CrossEntropyTable<scalar_t>& table, int64_t row,
                                         int target, bool with_metrics, int first,
                                         const Pack<scalar_t, kCount>& pack,
                                         ThreadPart<scalar_t>& part) {
  using acc_t = RowAcc<scalar_t>;
  acc_t z[kCount];
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    z[e] = kWork == RowWork::kPlain ? static_cast<acc_t>(pack.value[e]) : table.z(pack.value[e]);
  }
  if constexpr (kWork == RowWork::kAny) {
    const bool has_shares = table.probabilities != nullptr || table.label_smoothing != 0;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const int c = first + e;
      const auto x = static_cast<acc_t>(pack.value[e]);
      if (with_metrics && (x > part.best || (x != x && part.best == part.best))) {
        part.best = x;
        part.best_class = c;
      }
      if (!has_shares || c == target) continue;
      const double share = table.share(row, c);
      part.shares += share;
      part.shares_z += share * z[e];
    }
  }
  acc_t largest = part.largest;
#pragma unroll
  for (int e = 0; e < kCount; ++e) largest = math::Lane<acc_t>::larger(largest, z[e]);
  if (largest == -HUGE_VALF) return;  // -inf − -inf would be no number
  if (!(largest <= part.largest)) part.raise(largest);
  if (target >= first && target < first + kCount) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      if (first + e == target) z[e] = -HUGE_VALF;
    }
  }
  const RowExponential<scalar_t> exponential(largest);
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const double term = exponential.term(z[e]);
    part.sum += term;
    if constexpr (kWork == RowWork::kAny) {
      if (with_metrics && term != 0) part.sum_z += term * z[e];
    }
  }
}

// What a team has seen of a row.
template <typename scalar_t, typename Team>
__device__ __forceinline__ math::RowPart team_part(const Team& team, ThreadPart<scalar_t>& part,
                                                   RowWork work) {
  math::RowPart whole;
  whole.largest = team_largest(team, part.largest);
  const bool is_finite = math::is_finite(whole.largest);
  if (is_finite && part.largest != -HUGE_VALF) {
    part.raise(static_cast<RowAcc<scalar_t>>(whole.largest));
  }
  const RowExponential<scalar_t> exponential(
      static_cast<RowAcc<scalar_t>>(is_finite ? whole.largest : 0.0));
  whole.reference = exponential.reference();
  whole.sum = team_sum(team, part.sum) * RowExponential<scalar_t>::kUnbias;
  if (work == RowWork::kAny) {
    whole.shares = team_sum(team, part.shares);
    whole.spread = whole.reference * whole.shares - team_sum(team, part.shares_z);
    const double sum_z = team_sum(team, part.sum_z) * RowExponential<scalar_t>::kUnbias;
    whole.entropy = whole.reference * whole.sum - sum_z;
  }
  return whole;
}

template <typename scalar_t, typename Team>
__device__ __forceinline__ int64_t team_argmax(const Team& team, const ThreadPart<scalar_t>& part) {
  const double best = team_largest(team, part.best);
  const bool has_it = part.best == best || (best != best && part.best != part.best);
  // The first of them: classes are doubles here, exactly.
  return static_cast<int64_t>(team.joined(has_it ? part.best_class : 2147483648.0,
                                          [](double a, double b) { return a < b ? a : b; }));
}

template <typename scalar_t, typename Team>
__device__ __forceinline__ void write_zeros(const Team& team, scalar_t* row, int classes) {
  for (int c = team.index(); c < classes; c += Team::kSize) row[c] = static_cast<scalar_t>(0.0f);
}

// The second pass. Each thread reads what it then writes, which may be the same memory.
template <RowWork kWork, typename scalar_t, typename Team>
__device__ __forceinline__ void write_gradient(const Team& team,
                                               const CrossEntropyTable<scalar_t>& table,
                                               int64_t row, int target,
                                               const math::RowStatistics& statistics,
                                               double target_share, double scale, scalar_t* out) {
  using acc_t = RowAcc<scalar_t>;
  using Exponential = RowExponential<scalar_t>;
  const scalar_t* const in = table.input + row * table.row_stride;
  const bool is_finite = math::is_finite(statistics.largest);
  const Exponential exponential(static_cast<acc_t>(is_finite ? statistics.largest : 0.0));
  const math::RowGradient gradient =
      math::row_gradient(statistics, exponential.reference(), target_share, table.z_loss, scale);
  const typename Exponential::Factor factor(gradient.of_exponential);
  const bool has_shares = table.probabilities != nullptr || table.label_smoothing != 0;
  const auto value = [&](int c, scalar_t logit) {
    acc_t g = exponential.times(
        kWork == RowWork::kPlain ? static_cast<acc_t>(logit) : table.z(logit), factor);
    double slope = 1;
    if constexpr (kWork == RowWork::kAny) {
      if (has_shares) g -= static_cast<acc_t>(gradient.scale * table.share(row, c));
      if (table.softcap != 0) {
        slope = math::softcap_slope(static_cast<acc_t>(logit), table.softcap);
        g *= static_cast<acc_t>(slope);
      }
    }
    return static_cast<scalar_t>(
        static_cast<acc_t>(c == target ? gradient.of_target * slope : static_cast<double>(g)));
  };
  // Packs where the row and its gradient lie alike to their boundaries.
  const bool in_packs =
      (reinterpret_cast<uintptr_t>(in) - reinterpret_cast<uintptr_t>(out)) % 16 == 0;
  constexpr int kUnroll = kRowUnroll<kWork, Team, scalar_t>;
  visit_row<kUnroll>(team, in, table.classes, in_packs, [&](int first, auto pack) {
#pragma unroll
    for (int e = 0; e < decltype(pack)::kSize; ++e) pack.value[e] = value(first + e, pack.value[e]);
    store_pack(out + first, pack);
  });
}

template <typename scalar_t, typename Team, RowWork kWork>
__global__ void __launch_bounds__(kThreads, kRowBlocks<kWork, scalar_t>)
    cross_entropy_forward_kernel(const __grid_constant__ CrossEntropyTable<scalar_t> table,
                                 CrossEntropyResults<scalar_t> results) {
  AMPFUSE_SHARED(double, scratch, Team::kScratch);
  const Team team(scratch);
  const double scale = results.grad == nullptr ? 0 : *results.baked / *results.divisor;
  const bool with_metrics = results.argmax != nullptr;
  for (int64_t row = team.number(); row < table.rows; row += Team::count()) {
    scalar_t* const grad =
        results.grad == nullptr ? nullptr : results.grad + row * results.grad_stride;
    const bool is_ignored = table.is_ignored(row);
    const bool is_first = team.index() == 0;
    if (is_ignored && !with_metrics) {
      if (grad != nullptr) write_zeros(team, grad, table.classes);
      if (is_first) results.losses[row] = 0;
      if (is_first) results.statistics[row] = {};
      continue;
    }
    // Before anything of the row is overwritten.
    const math::RowTarget target = table.row_target(row);
    const int target_class = table.target_class(row);
    ThreadPart<scalar_t> part;
    visit_row<kRowUnroll<kWork, Team, scalar_t>>(
        team, table.input + row * table.row_stride, table.classes, /*in_packs=*/true,
        [&](int first, const auto& pack) {
          add_pack<kWork>(table, row, target_class, with_metrics, first, pack, part);
        });
    const math::RowPart whole = team_part<scalar_t>(team, part, kWork);
    const math::RowLoss loss = math::row_loss(whole, target, table.z_loss);
    if constexpr (kWork == RowWork::kAny) {
      if (with_metrics) {
        const int64_t argmax = team_argmax(team, part);
        if (is_first) {
          results.lse[row] = static_cast<RowAcc<scalar_t>>(loss.lse);
          results.entropy[row] = static_cast<RowAcc<scalar_t>>(loss.entropy);
          results.argmax[row] = argmax;
        }
      }
    }
    if (is_first) results.losses[row] = is_ignored ? 0 : loss.loss;
    if (is_first) results.statistics[row] = is_ignored ? math::RowStatistics{} : loss.statistics;
    if (grad == nullptr) continue;
    team.sync();  // everyone has read the target's logit
    if (is_ignored) {
      write_zeros(team, grad, table.classes);
    } else {
      write_gradient<kWork>(team, table, row, target_class, loss.statistics, target.share, scale,
                            grad);
    }
  }
}

// The gradient from the logits, for one number from upstream or one for each row.
template <typename scalar_t, typename Team, RowWork kWork>
__global__ void __launch_bounds__(kThreads, kRowBlocks<kWork, scalar_t>)
    cross_entropy_backward_kernel(const __grid_constant__ CrossEntropyTable<scalar_t> table,
                                  const math::RowStatistics* statistics, const double* divisor,
                                  const double* upstream, bool is_each, scalar_t* grad) {
  AMPFUSE_SHARED(double, scratch, Team::kScratch);
  const Team team(scratch);
  for (int64_t row = team.number(); row < table.rows; row += Team::count()) {
    scalar_t* const out = grad + row * table.classes;
    if (table.is_ignored(row)) {
      write_zeros(team, out, table.classes);
      continue;
    }
    write_gradient<kWork>(team, table, row, table.target_class(row), statistics[row],
                          table.row_target(row).share, upstream[is_each ? row : 0] / *divisor, out);
  }
}

}  // namespace ampfuse
