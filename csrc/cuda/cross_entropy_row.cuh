// One row of a cross-entropy: the pass over its logits that computes the row's partial sums.
#pragma once

#include "cross_entropy_plain.cuh"

namespace ampfuse {

// The work of a pass. kPlain is for losses in which only the target class has a mass B
// (math/cross_entropy.h), without softcap and metrics: it needs exponentials only. kGeneral does
// everything, and needs more registers. kHeld is kPlain for rows that fit in the registers of a
// team (cross_entropy_held.cuh). With kHeldTwice, half as many threads hold twice as much each.
enum class RowWork { kPlain, kGeneral, kHeld, kHeldTwice };

AMPFUSE_HOST_DEVICE constexpr bool is_held(RowWork work) {
  return work == RowWork::kHeld || work == RowWork::kHeldTwice;
}

// Threads that a multiprocessor has registers for; kGeneral and double need more registers per
// thread.
template <RowWork kWork, typename scalar_t>
inline constexpr int kRowThreads =
    std::is_same_v<scalar_t, double> ? 512
    : kWork == RowWork::kGeneral     ? 768
    : kWork == RowWork::kHeldTwice   ? 512
                                     : kThreads * kBlocksPerMultiprocessor;
template <RowWork kWork, typename scalar_t, typename Team>
inline constexpr int kRowBlocks = kRowThreads<kWork, scalar_t> / Team::kBlock;

// Packs that a thread has in flight: three (48 bytes), or fewer in kernels that need the registers
// for arithmetic. GPUs before Hopper have at most two, since their memory is slower and their code
// needs more registers. A pack takes 4 registers, or 8 if it is not aligned.
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ < 900
inline constexpr int kMostPacks = 2;
#else
inline constexpr int kMostPacks = 3;
#endif
template <typename scalar_t, typename Team>
inline constexpr int kReadUnroll = sizeof(scalar_t) == 8                        ? 1
                                   : sizeof(scalar_t) == 2 && Team::kTeams == 1 ? kMostPacks
                                                                                : 2;

// The packs of a row that are kept in shared memory between the two passes: the first `count`, as
// many as fit. The second pass reads the others again, from the L2 cache.
template <typename scalar_t>
class KeptPacks {
 public:
  const int count;

  // `packs` must be in shared memory.
  __device__ KeptPacks(Pack<scalar_t>* packs, int count) : count(count) {
#if defined(__CUDA_ARCH__)
    packs_ = static_cast<uint32_t>(__cvta_generic_to_shared(packs));
    // Otherwise nvcc computes the address again for each store, with four instructions. Kernels of
    // 16-bit logits have no register to keep it.
    if constexpr (sizeof(scalar_t) > 2) asm volatile("" : "+r"(packs_));
#else
    packs_ = packs;
#endif
  }

  // Keeps pack p of the row if there is room for it.
  __device__ __forceinline__ void keep(int p, const Pack<scalar_t>& pack) const {
    if (p < count) packs()[p] = pack;
  }

  __device__ Pack<scalar_t>* packs() const {
#if defined(__CUDA_ARCH__)
    return static_cast<Pack<scalar_t>*>(__cvta_shared_to_generic(packs_));
#else
    return packs_;
#endif
  }

 private:
#if defined(__CUDA_ARCH__)
  uint32_t packs_;  // an address in shared memory, half as long as a pointer
#else
  Pack<scalar_t>* packs_;
#endif
};

// A thread's partial sums over its part of a row, with kGeneral. Exponentials are relative to the
// reference of RowExponential(largest); `entropy` and `spread` are relative to `largest` itself.
template <typename scalar_t>
struct ThreadPartial {
  using acc_t = RowAcc<scalar_t>;
  acc_t largest = -HUGE_VALF;
  double sum = 0;      // Σ biased exponentials
  double entropy = 0;  // Σ biased exponentials · (largest − z)
  double masses = 0;   // Σ B
  double spread = 0;   // Σ B·(largest − z)
  acc_t best = -HUGE_VALF;
  int best_class = 0;

  __device__ void raise(acc_t to) {
    using Exponential = RowExponential<scalar_t>;
    const double factor = sum == 0 ? 1.0 : double(Exponential(to).from(Exponential(largest)));
    const double lift = static_cast<double>(to) - largest;
    spread += math::times_or_zero(masses, lift);
    entropy = (entropy + math::times_or_zero(sum, lift)) * factor;
    sum *= factor;
    largest = to;
  }
};

template <typename scalar_t, int kCount>
__device__ __forceinline__ void add_argmax(int first, const Pack<scalar_t, kCount>& pack,
                                           ThreadPartial<scalar_t>& partial) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const auto x = static_cast<RowAcc<scalar_t>>(pack.value[e]);
    const bool is_nan = x != x;
    // A thread visits its classes in ascending order, so the first of equal ones stays.
    if (x > partial.best || (is_nan && partial.best == partial.best)) {
      partial.best = x;
      partial.best_class = first + e;
    }
  }
}

template <typename scalar_t, int kCount>
__device__ __forceinline__ void add_masses(const CrossEntropyTable<scalar_t>& table,
                                           const RowAcc<scalar_t>* probabilities, int target,
                                           int first, const RowAcc<scalar_t> (&z)[kCount],
                                           ThreadPartial<scalar_t>& partial) {
  using acc_t = RowAcc<scalar_t>;
  acc_t masses[kCount];
  acc_t spreads[kCount];
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    const bool is_target = first + e == target;
    // −∞ − −∞ would be NaN.
    const acc_t below = z[e] == -HUGE_VALF ? acc_t(HUGE_VALF) : partial.largest - z[e];
    masses[e] = is_target ? 0 : table.mass(probabilities, first + e);
    spreads[e] = is_target ? 0 : masses[e] * below;
  }
  partial.masses += sum_in_pairs(masses);
  partial.spread += sum_in_pairs(spreads);
}

template <int kCount, typename scalar_t>
__device__ __forceinline__ void add_pack(const CrossEntropyTable<scalar_t>& table,
                                         const RowAcc<scalar_t>* probabilities, int target,
                                         bool with_metrics, int first,
                                         const Pack<scalar_t, kCount>& pack,
                                         ThreadPartial<scalar_t>& partial) {
  using acc_t = RowAcc<scalar_t>;
  acc_t z[kCount];
  widen(pack, z);
#pragma unroll
  for (int e = 0; e < kCount; ++e) z[e] = table.z(z[e]);
  acc_t largest = partial.largest;
#pragma unroll
  for (int e = 0; e < kCount; ++e) largest = math::Lane<acc_t>::larger(largest, z[e]);
  if (!(largest <= partial.largest)) partial.raise(largest);
  if (with_metrics) add_argmax(first, pack, partial);
  if (table.has_masses()) add_masses(table, probabilities, target, first, z, partial);
  if (largest == -HUGE_VALF) return;  // every exponential so far is 0
  leave_out(target, first, z);
  const RowExponential<scalar_t> exponential(largest);
  typename RowExponential<scalar_t>::Term terms[kCount];
#pragma unroll
  for (int e = 0; e < kCount; ++e) terms[e] = exponential.term(z[e]);
  if (with_metrics) {
    RowNumber<scalar_t> entropies[kCount];
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      entropies[e] = math::times_or_zero(number_of(terms[e]), RowNumber<scalar_t>(largest - z[e]));
    }
    partial.entropy += sum_in_pairs(entropies);
  }
  partial.sum += sum_in_pairs(terms);
}

// Combines the partial sums of a team's threads.
template <typename scalar_t, typename Team>
__device__ __forceinline__ math::RowPartial<RowNumber<scalar_t>> team_partial(
    const Team& team, ThreadPartial<scalar_t>& partial) {
  using acc_t = RowAcc<scalar_t>;
  using Number = RowNumber<scalar_t>;
  using Exponential = RowExponential<scalar_t>;
  const acc_t largest = team_largest(team, partial.largest);
  if (math::is_finite(largest)) partial.raise(largest);
  const double sum = team_sum(team, partial.sum) * Exponential::kUnbias;
  const double reference = row_exponential<scalar_t>(largest).reference();
  const double lift = reference - largest;
  const double masses = team_sum(team, partial.masses);
  // `lift` is infinite if every logit is −∞. Then `sum` is 0, and `masses` is 0 or the loss
  // infinite.
  const double spread = team_sum(team, partial.spread) + math::times_or_zero(masses, lift);
  const double entropy =
      team_sum(team, partial.entropy) * Exponential::kUnbias + math::times_or_zero(sum, lift);
  return {static_cast<Number>(largest), static_cast<Number>(reference),
          static_cast<Number>(sum),     static_cast<Number>(masses),
          static_cast<Number>(spread),  static_cast<Number>(entropy)};
}

template <typename scalar_t, typename Team>
__device__ __forceinline__ int64_t team_argmax(const Team& team,
                                               const ThreadPartial<scalar_t>& partial) {
  const auto best = team_largest(team, partial.best);
  const bool has_it = partial.best == best || (best != best && partial.best != partial.best);
  // Take the first of equal classes. A double holds a class index exactly.
  return static_cast<int64_t>(team_smallest(team, has_it ? partial.best_class : 2147483648.0));
}

// The results of the first pass over a row.
template <typename scalar_t>
struct RowSums {
  math::RowPartial<RowNumber<scalar_t>> partial;
  // The second pass uses this reference; `factor` is exp(this reference − the reference of
  // row_exponential(largest)).
  RowExponential<scalar_t> exponential;
  RowNumber<scalar_t> factor;
  int64_t argmax;  // if asked for
};

// `pass(start, add)` calls start(), and then add(index of the first class, pack, keep) for each
// pack. add calls keep(pack) with what the second pass needs.
template <RowWork kWork, typename scalar_t, typename Team, typename Pass>
__device__ __forceinline__ RowSums<scalar_t> row_sums(const Team& team,
                                                      const CrossEntropyTable<scalar_t>& table,
                                                      const RowAcc<scalar_t>* probabilities,
                                                      int target, scalar_t target_logit,
                                                      bool with_metrics, const Pass& pass) {
  using Number = RowNumber<scalar_t>;
  if constexpr (kWork == RowWork::kPlain) {
    const PlainTotal<scalar_t> total = plain_total(team, target, target_logit, pass);
    const auto exponential = row_exponential<scalar_t>(total.largest);
    const math::RowPartial<Number> partial = {static_cast<Number>(total.largest),
                                              static_cast<Number>(exponential.reference()),
                                              static_cast<Number>(total.sum)};
    if constexpr (!kKeepsExponentials<scalar_t>) return {partial, exponential, 1, 0};
    return {partial, total.exponential, exponential.from(total.exponential), 0};
  } else {
    ThreadPartial<scalar_t> partial;
    pass([] {},
         [&](int first, const auto& pack, const auto& keep) {
           keep(pack);
           add_pack(table, probabilities, target, with_metrics, first, pack, partial);
         });
    const auto whole = team_partial(team, partial);
    const auto exponential =
        row_exponential<scalar_t>(static_cast<RowAcc<scalar_t>>(whole.largest));
    return {whole, exponential, 1, with_metrics ? team_argmax(team, partial) : 0};
  }
}

// The first pass over a row. Packs start at the row's first class, whatever its alignment, and
// classes after the last pack are read one by one. The last bits of a sum depend on which thread
// adds which elements in which order; this way they are the same for equal rows.
template <RowWork kWork, typename scalar_t, typename Team>
__device__ __forceinline__ RowSums<scalar_t> read_row(const Team& team,
                                                      const CrossEntropyTable<scalar_t>& table,
                                                      int64_t row, int target,
                                                      scalar_t target_logit, bool with_metrics,
                                                      const KeptPacks<scalar_t>& kept) {
  using P = Pack<scalar_t>;
  const scalar_t* const in = table.template logits_of<Team>(row);
  const int packs = table.classes / P::kSize;
  static_assert(Team::kSize >= P::kSize);
  const int single = packs * P::kSize + team.index();
  const auto pass = [&](const auto& start, const auto& add) {
    each_pack<kReadUnroll<scalar_t, Team>>(
        team, PacksAnywhere<scalar_t>(in), 0, packs, start, [&](int p, const P& pack) {
          add(p * P::kSize, pack, [&](const P& kept_pack) { kept.keep(p, kept_pack); });
        });
    if (single < table.classes) add(single, Pack<scalar_t, 1>{{in[single]}}, [](const auto&) {});
  };
  return row_sums<kWork>(team, table, table.template probabilities_of<Team>(row), target,
                         target_logit, with_metrics, pass);
}

// Returns the part of shared memory that keeps the packs of this team's row.
template <typename scalar_t, typename Team>
__device__ __forceinline__ KeptPacks<scalar_t> kept_packs(const Team& team, int count) {
  AMPFUSE_DYNAMIC_SHARED(uint4, shared);
  return {reinterpret_cast<Pack<scalar_t>*>(shared) + team.index_in_block() * count, count};
}

}  // namespace ampfuse
