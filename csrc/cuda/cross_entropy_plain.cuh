// The first pass over a row with RowWork::kPlain: the largest logit, and the sum of exponentials.
#pragma once

#include "cross_entropy_rounding.cuh"
#include "cross_entropy_table.cuh"
#include "team.cuh"
#include "vectorized.cuh"

namespace ampfuse {

// Prevents the compiler from replacing the branch around this call with selections. Only one pack
// per row takes the branch, but selections would take two instructions for every logit.
__device__ __forceinline__ void stay_a_branch() {
#if defined(__CUDA_ARCH__)
  asm volatile("");
#endif
}

// If the target class is among these kCount classes from `first` on, sets its z to −∞, so that its
// exponential is 0.
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
  requires(std::is_arithmetic_v<T>)
__device__ __forceinline__ T sum_in_pairs(T (&x)[kCount]) {
#pragma unroll
  for (int step = 1; step < kCount; step *= 2) {
#pragma unroll
    for (int i = 0; i + step < kCount; i += 2 * step) x[i] += x[i + step];
  }
  return x[0];
}

// The high parts are added in double, the low parts in float.
template <int kCount>
__device__ __forceinline__ double sum_in_pairs(const math::InTwo<float> (&x)[kCount]) {
  double high[kCount];
  float low[kCount];
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    high[e] = x[e].high;
    low[e] = x[e].low;
  }
  return sum_in_pairs(high) + sum_in_pairs(low);
}

// Returns an exponential as the number that it stands for.
template <typename T>
__device__ __forceinline__ T number_of(T x) {
  return x;
}
__device__ __forceinline__ double number_of(math::InTwo<float> x) {
  return static_cast<double>(x.high) + x.low;
}
// Returns an exponential in the type of the logits.
template <typename T>
__device__ __forceinline__ T kept_number(T x) {
  return x;
}
__device__ __forceinline__ float kept_number(math::InTwo<float> x) {
  return x.high;
}

// True if the first pass keeps exponentials for the second one, instead of logits. 16-bit numbers
// have too few digits for that.
template <typename scalar_t>
inline constexpr bool kKeepsExponentials = sizeof(scalar_t) > 2;

// The sum over a thread's part of a row: 7 to 8 instructions per 16-bit logit.
//
// The reference is fixed for a pass over the row, so that no pack waits for the largest logit of
// those before it, and sums need not be rescaled. It is the target's logit. The error of the sum
// grows with the distance from the target's logit to the largest one, but the loss is at least that
// distance, so its relative error stays small.
template <typename scalar_t>
class PlainSum {
 public:
  using acc_t = RowAcc<scalar_t>;

  __device__ explicit PlainSum(acc_t reference) : exponential_(reference) {}

  // Adds the exponentials of a pack, without the target's. Calls keep(pack) with what a second pass
  // needs.
  template <int kCount, typename Keep>
  __device__ __forceinline__ void add(int first, const Pack<scalar_t, kCount>& pack, int target,
                                      const Keep& keep) {
    if constexpr (!kKeepsExponentials<scalar_t>) keep(pack);
    largest_.add(pack);
    acc_t z[kCount];
    widen(pack, z);
    leave_out(target, first, z);
    typename RowExponential<scalar_t>::Term terms[kCount];
#pragma unroll
    for (int e = 0; e < kCount; ++e) terms[e] = exponential_.term(z[e]);
    if constexpr (kKeepsExponentials<scalar_t>) {
      Pack<scalar_t, kCount> exponentials;
#pragma unroll
      for (int e = 0; e < kCount; ++e) exponentials.value[e] = kept_number(terms[e]);
      keep(exponentials);
    }
    sum_ += sum_in_pairs(terms);
  }

  __device__ acc_t largest() const { return largest_.get(); }
  __device__ double sum() const { return sum_; }
  __device__ const RowExponential<scalar_t>& exponential() const { return exponential_; }

  // Returns true if the row's largest logit is too far from the reference: the sum may have
  // overflowed, or lost terms that matter.
  __device__ bool must_repeat(acc_t largest) const {
    const acc_t power = exponential_.exponent(largest);
    return math::is_finite(largest) && (power > 60 || power < -20);
  }

 private:
  RowExponential<scalar_t> exponential_;
  PackMaximum<scalar_t> largest_;
  typename RowExponential<scalar_t>::Sum sum_ = 0;
};

// The results of a pass over a row.
template <typename scalar_t>
struct PlainTotal {
  RowAcc<scalar_t> largest;
  double sum;                            // relative to row_exponential(largest)
  RowExponential<scalar_t> exponential;  // the reference of kept exponentials
};

// `pass(start, add)` calls start(), and then add(index of the first class, pack, keep) for each
// pack. If the target's logit is too far from the row's largest one to be the reference, the team
// repeats the pass with the largest one. The choice depends on the row alone, so equal rows get the
// same bits.
template <typename scalar_t, typename Team, typename Pass>
__device__ __forceinline__ PlainTotal<scalar_t> plain_total(const Team& team, int target,
                                                            scalar_t target_logit,
                                                            const Pass& pass) {
  using acc_t = RowAcc<scalar_t>;
  PlainSum<scalar_t> sum(0);
  acc_t largest;
  scalar_t reference = target_logit;
#pragma unroll 1
  do {
    pass(
        [&] {
          const auto wanted = static_cast<acc_t>(reference);
          sum = PlainSum<scalar_t>(math::is_finite(wanted) ? wanted : 0);
        },
        [&](int first, const auto& pack, const auto& keep) { sum.add(first, pack, target, keep); });
    largest = team_largest(team, sum.largest());
    reference = static_cast<scalar_t>(largest);
  } while (sum.must_repeat(largest));  // false with the largest logit as the reference
  const double total = team_sum(team, sum.sum()) * RowExponential<scalar_t>::kUnbias;
  return {largest, total * row_exponential<scalar_t>(largest).from(sum.exponential()),
          sum.exponential()};
}

}  // namespace ampfuse
