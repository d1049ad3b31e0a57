// One row of a cross-entropy: the pass over its logits that computes the row's partial sums.
#pragma once

#include "cross_entropy_rounding.cuh"
#include "cross_entropy_table.cuh"
#include "team.cuh"
#include "vectorized.cuh"

namespace ampfuse {

// The work of a pass. kPlain computes exponentials only, for a B that is 0 except at the target, no
// softcap and no metrics. kAny does everything, and needs more registers.
enum class RowWork { kPlain, kAny };

// Threads that a multiprocessor has registers for; kAny and double need more registers per thread.
template <RowWork kWork, typename scalar_t>
inline constexpr int kRowThreads = std::is_same_v<scalar_t, double> ? 512
                                   : kWork == RowWork::kAny ? 768
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
struct KeptPacks {
  Pack<scalar_t>* packs;
  int count;
};

// A thread's partial sums over its part of a row. Exponentials are relative to the reference of
// RowExponential(largest); `entropy` and `spread` are relative to `largest` itself.
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

  __device__ void raise(acc_t to, RowWork work) {
    const double factor = sum == 0 ? 1.0 : double(RowExponential<scalar_t>(to).from(largest));
    if (work == RowWork::kAny) {
      const double lift = static_cast<double>(to) - largest;
      spread += math::times_or_zero(masses, lift);
      entropy = (entropy + math::times_or_zero(sum, lift)) * factor;
    }
    sum *= factor;
    largest = to;
  }
};

// Keeps the branch it is called in a real branch. Only one pack per row takes the branch; without
// this call the compiler turns it into selections, two more instructions for every logit.
__device__ __forceinline__ void stay_a_branch() {
#if defined(__CUDA_ARCH__)
  asm volatile("");
#endif
}

// Makes the exponential of the target class 0, if it is among these classes from `first` on.
template <typename acc_t, int kCount>
__device__ __forceinline__ void leave_out(int target, int first, acc_t (&z)[kCount]) {
  if (static_cast<unsigned>(target - first) >= kCount) return;
  stay_a_branch();
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    if (first + e == target) z[e] = -HUGE_VALF;
  }
}

template <typename T, int kCount>
__device__ __forceinline__ T sum_in_pairs(T (&x)[kCount]) {
#pragma unroll
  for (int step = 1; step < kCount; step *= 2) {
#pragma unroll
    for (int i = 0; i + step < kCount; i += 2 * step) x[i] += x[i + step];
  }
  return x[0];
}

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

template <RowWork kWork, int kCount, typename scalar_t>
__device__ __forceinline__ void add_pack(const CrossEntropyTable<scalar_t>& table,
                                         const RowAcc<scalar_t>* probabilities, int target,
                                         bool with_metrics, int first,
                                         const Pack<scalar_t, kCount>& pack,
                                         ThreadPartial<scalar_t>& partial) {
  using acc_t = RowAcc<scalar_t>;
  acc_t z[kCount];
  widen(pack, z);
  if constexpr (kWork == RowWork::kAny) {
#pragma unroll
    for (int e = 0; e < kCount; ++e) z[e] = table.z(z[e]);
  }
  acc_t largest = partial.largest;
#pragma unroll
  for (int e = 0; e < kCount; ++e) largest = math::Lane<acc_t>::larger(largest, z[e]);
  if (!(largest <= partial.largest)) partial.raise(largest, kWork);
  if constexpr (kWork == RowWork::kAny) {
    if (with_metrics) add_argmax(first, pack, partial);
    if (table.has_masses()) add_masses(table, probabilities, target, first, z, partial);
  }
  if (largest == -HUGE_VALF) return;  // every exponential so far is 0
  leave_out(target, first, z);
  const RowExponential<scalar_t> exponential(largest);
  using Term = typename RowExponential<scalar_t>::Term;
  Term terms[kCount];
#pragma unroll
  for (int e = 0; e < kCount; ++e) terms[e] = exponential.term(z[e]);
  if constexpr (kWork == RowWork::kAny) {
    if (with_metrics) {
      Term entropies[kCount];
#pragma unroll
      for (int e = 0; e < kCount; ++e) {
        entropies[e] = terms[e] == 0 ? 0 : terms[e] * (largest - z[e]);
      }
      partial.entropy += sum_in_pairs(entropies);
    }
  }
  partial.sum += sum_in_pairs(terms);
}

// The sum over a thread's part of a row of 16-bit logits, with kPlain: 7 instructions per logit.
//
// The reference is fixed for a pass over the row, so that no pack waits for the largest logit of
// those before it, and sums need not be rescaled. It is the target's logit, which costs a loss no
// digits: the further it is below the largest logit, the larger is the loss. If it is too far from
// the thread's largest logit, the thread repeats the pass with that one. So the choice depends on
// the row alone, as the last bits of its sum do.
template <typename scalar_t>
class PlainSum {
 public:
  __device__ explicit PlainSum(float reference) : exponential_(reference) {}

  template <int kCount>
  __device__ __forceinline__ void add(int first, const Pack<scalar_t, kCount>& pack, int target) {
    largest_.add(pack);
    float z[kCount];
    widen(pack, z);
    leave_out(target, first, z);
#pragma unroll
    for (int e = 0; e < kCount; ++e) z[e] = exponential_.term(z[e]);
    sum_ += sum_in_pairs(z);
  }

  __device__ float largest() const { return largest_.get(); }

  // Returns true if the sum may have overflowed, or lost terms that matter, for this largest logit.
  __device__ bool is_off(float largest) const {
    const float power = exponential_.exponent(largest);
    return math::is_finite(largest) && (power > 80 || power < -60);
  }

  __device__ ThreadPartial<scalar_t> partial(float largest) const {
    ThreadPartial<scalar_t> partial;
    partial.largest = largest;
    if (largest == -HUGE_VALF) return partial;  // every exponential is 0
    partial.sum = sum_ * RowExponential<scalar_t>(largest).from(exponential_);
    return partial;
  }

 private:
  RowExponential<scalar_t> exponential_;
  PackMaximum<scalar_t> largest_;
  float sum_ = 0;
};

// The sums of a pass over a row. `pass(start, add)` calls start(), and then add(index of the first
// class, pack) for each pack.
template <RowWork kWork, typename scalar_t, typename Pass>
__device__ __forceinline__ ThreadPartial<scalar_t> sums_of(const CrossEntropyTable<scalar_t>& table,
                                                           const RowAcc<scalar_t>* probabilities,
                                                           int target, scalar_t target_logit,
                                                           bool with_metrics, const Pass& pass) {
  if constexpr (kWork == RowWork::kPlain && sizeof(scalar_t) == 2) {
    PlainSum<scalar_t> sum(0);
    bool is_second = false;
    float largest = 0;
#pragma unroll 1
    do {
      pass(
          [&] {
            const float reference = is_second ? largest : static_cast<float>(target_logit);
            sum = PlainSum<scalar_t>(math::is_finite(reference) ? reference : 0);
          },
          [&](int first, const auto& pack) { sum.add(first, pack, target); });
      largest = sum.largest();
      is_second = !is_second && sum.is_off(largest);
    } while (is_second);
    return sum.partial(largest);
  } else {
    ThreadPartial<scalar_t> partial;
    pass([] {},
         [&](int first, const auto& pack) {
           add_pack<kWork>(table, probabilities, target, with_metrics, first, pack, partial);
         });
    return partial;
  }
}

// The first pass over a row. Packs start at the row's first class, whatever its alignment, and
// classes after the last pack are read one by one. The last bits of a sum depend on which thread
// adds which elements in which order; this way they are the same for equal rows.
template <RowWork kWork, typename scalar_t, typename Team>
__device__ __forceinline__ ThreadPartial<scalar_t> read_row(
    const Team& team, const CrossEntropyTable<scalar_t>& table, int64_t row, int target,
    scalar_t target_logit, bool with_metrics, const KeptPacks<scalar_t>& kept) {
  using P = Pack<scalar_t>;
  const scalar_t* const in = table.template logits_of<Team>(row);
  const int packs = table.classes / P::kSize;
  static_assert(Team::kSize >= P::kSize);
  const int single = packs * P::kSize + team.index();
  const auto pass = [&](const auto& start, const auto& add) {
    each_pack<kReadUnroll<scalar_t, Team>>(team, PacksAnywhere<scalar_t>(in), 0, packs, start,
                                           [&](int p, const P& pack) {
                                             if (p < kept.count) kept.packs[p] = pack;
                                             add(p * P::kSize, pack);
                                           });
    if (single < table.classes) add(single, Pack<scalar_t, 1>{{in[single]}});
  };
  return sums_of<kWork>(table, table.template probabilities_of<Team>(row), target, target_logit,
                        with_metrics, pass);
}

// Combines the partial sums of a team's threads.
template <typename scalar_t, typename Team>
__device__ __forceinline__ math::RowPartial<RowNumber<scalar_t>> team_partial(
    const Team& team, ThreadPartial<scalar_t>& partial, RowWork work) {
  using acc_t = RowAcc<scalar_t>;
  using Number = RowNumber<scalar_t>;
  using Exponential = RowExponential<scalar_t>;
  const acc_t largest = team_largest(team, partial.largest);
  const bool is_finite = math::is_finite(largest);
  if (is_finite) partial.raise(largest, work);
  const double sum = team_sum(team, partial.sum) * Exponential::kUnbias;
  const double reference = row_exponential<scalar_t>(largest).reference();
  math::RowPartial<Number> whole;
  whole.largest = static_cast<Number>(largest);
  whole.reference = static_cast<Number>(reference);
  whole.sum = static_cast<Number>(sum);
  if (work == RowWork::kAny) {
    const double lift = reference - largest;
    const double masses = team_sum(team, partial.masses);
    whole.masses = static_cast<Number>(masses);
    whole.spread = static_cast<Number>(team_sum(team, partial.spread) + masses * lift);
    const double entropy = team_sum(team, partial.entropy) * Exponential::kUnbias;
    whole.entropy = static_cast<Number>(entropy + sum * lift);
  }
  return whole;
}

template <typename scalar_t, typename Team>
__device__ __forceinline__ int64_t team_argmax(const Team& team,
                                               const ThreadPartial<scalar_t>& partial) {
  const auto best = team_largest(team, partial.best);
  const bool has_it = partial.best == best || (best != best && partial.best != partial.best);
  // Take the first of equal classes. A double holds a class index exactly.
  return static_cast<int64_t>(team_smallest(team, has_it ? partial.best_class : 2147483648.0));
}

// Returns the part of shared memory that keeps the packs of this team's row.
template <typename scalar_t, typename Team>
__device__ __forceinline__ KeptPacks<scalar_t> kept_packs(const Team& team, int count) {
  AMPFUSE_DYNAMIC_SHARED(uint4, shared);
  return {reinterpret_cast<Pack<scalar_t>*>(shared) + team.index_in_block() * count, count};
}

}  // namespace ampfuse
