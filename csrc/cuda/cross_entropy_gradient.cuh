// One row of a cross-entropy: the pass that writes its gradient.
#pragma once

#include "cross_entropy_rounding.cuh"
#include "cross_entropy_row.cuh"

namespace ampfuse {

// Packs that a thread has in flight in the second pass; kReadUnroll is their number in the first.
// Half of the bytes that the second pass moves are writes, so two are enough.
template <typename scalar_t>
inline constexpr int kWriteUnroll = std::is_same_v<scalar_t, double> ? 1 : 2;

// Stores 16 or 8 bytes in one instruction. nvcc splits the assignment of a word that was converted
// from an array of 16-bit numbers into up to eight stores.
__device__ __forceinline__ void store_word(uint4* to, uint4 word) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v4.b32 [%0], {%1, %2, %3, %4};" ::"l"(__cvta_generic_to_global(to)),
               "r"(word.x), "r"(word.y), "r"(word.z), "r"(word.w)
               : "memory");
#else
  *to = word;
#endif
}
__device__ __forceinline__ void store_word(uint2* to, uint2 word) {
#if defined(__CUDA_ARCH__)
  asm volatile("st.global.v2.b32 [%0], {%1, %2};" ::"l"(__cvta_generic_to_global(to)), "r"(word.x),
               "r"(word.y)
               : "memory");
#else
  *to = word;
#endif
}

// Stores a pack of a gradient. Wide teams (kIsWide) rely on the L2 cache for the packs of their
// rows that are not kept in shared memory, so the gradient should leave the cache first (__stcs).
template <bool kIsWide, typename grad_t, int kCount>
__device__ __forceinline__ void store_gradient(grad_t* to, const Pack<grad_t, kCount>& pack) {
  if constexpr (sizeof(pack) >= 8) {
    using Word = std::conditional_t<sizeof(pack) == 16, uint4, uint2>;
    auto* const at = reinterpret_cast<Word*>(to);
    const auto word = __builtin_bit_cast(Word, pack);
    kIsWide ? __stcs(at, word) : store_word(at, word);
  } else {
    store_pack(to, pack);
  }
}

template <typename scalar_t, typename Team>
__device__ __forceinline__ void write_zeros(const Team& team, scalar_t* row, const RowsAt&,
                                            int classes) {
  using P = Pack<scalar_t>;
  const Pieces<scalar_t> pieces(row, classes);
  pieces.each_single(team, [&](int c) { row[c] = static_cast<scalar_t>(0.0f); });
#pragma unroll 4
  for (int p = team.index(); p < pieces.packs; p += Team::kSize) {
    store_gradient<Team::kIsWide>(row + pieces.first_of(p), P{});
  }
}

// Computes the gradient for packs of a row's logits.
template <RowWork kWork, typename scalar_t>
class PackGradient {
 public:
  using acc_t = RowAcc<scalar_t>;
  using Number = RowNumber<scalar_t>;

  // `factor` is exp(reference of `exponential` − reference of row_exponential(largest)).
  __device__ PackGradient(const CrossEntropyTable<scalar_t>& table, const acc_t* probabilities,
                          int target, const math::RowGradient<Number>& gradient,
                          const RowExponential<scalar_t>& exponential, Number factor)
      : table_(table),
        probabilities_(probabilities),
        target_(target),
        exponential_(exponential),
        factor_(gradient.of_exponential * factor),
        scale_(gradient.scale),
        of_target_(gradient.of_target) {}

  template <typename grad_t, int kCount>
  __device__ __forceinline__ Pack<grad_t, kCount> of(int first,
                                                     const Pack<scalar_t, kCount>& pack) const {
    acc_t logits[kCount];
    widen(pack, logits);
    acc_t result[kCount];
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      const acc_t logit = logits[e];
      acc_t g = exponential_.times(kWork == RowWork::kPlain ? logit : table_.z(logit), factor_);
      if constexpr (kWork == RowWork::kGeneral) {
        if (table_.has_masses()) {
          g -= static_cast<acc_t>(
              math::Lane<Number>::product(scale_, table_.mass(probabilities_, first + e)));
        }
        g *= slope(logit);
      }
      result[e] = g;
    }
    set_target(first, result, [&](int e) { return slope(logits[e]); });
    return rounded<grad_t>(result);
  }

  // Computes the gradient of every class but the target, which the caller sets afterwards.
  template <typename grad_t, int kCount>
  __device__ __forceinline__ Pack<grad_t, kCount> of_others(
      const Pack<scalar_t, kCount>& pack) const {
    static_assert(kWork == RowWork::kPlain);
    acc_t result[kCount];
    widen(pack, result);
#pragma unroll
    for (acc_t& x : result) x = exponential_.times(x, factor_);
    return rounded<grad_t>(result);
  }

  __device__ int target() const { return target_; }
  __device__ acc_t of_target() const { return static_cast<acc_t>(of_target_); }

  // Computes the gradient for a pack that the first pass kept: logits, or exponentials
  // (kKeepsExponentials).
  template <typename grad_t, int kCount>
  __device__ __forceinline__ Pack<grad_t, kCount> of_kept(
      int first, const Pack<scalar_t, kCount>& pack) const {
    if constexpr (kWork == RowWork::kPlain && kKeepsExponentials<scalar_t>) {
      acc_t result[kCount];
#pragma unroll
      for (int e = 0; e < kCount; ++e) result[e] = factor_.times(pack.value[e]);
      set_target(first, result, [](int) { return acc_t(1); });
      return rounded<grad_t>(result);
    } else {
      return of<grad_t>(first, pack);
    }
  }

 private:
  template <int kCount, typename Slope>
  __device__ __forceinline__ void set_target(int first, acc_t (&result)[kCount],
                                             const Slope& slope) const {
    if (target_ < first || target_ >= first + kCount) return;
    stay_a_branch();
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      if (first + e == target_) result[e] = static_cast<acc_t>(of_target_ * slope(e));
    }
  }

  __device__ acc_t slope(acc_t logit) const {
    if (kWork == RowWork::kPlain || table_.terms.softcap == 0) return 1;
    return math::softcap_slope(logit, table_.terms.softcap);
  }

  const CrossEntropyTable<scalar_t>& table_;
  const acc_t* probabilities_;
  int target_;
  RowExponential<scalar_t> exponential_;
  typename RowExponential<scalar_t>::Factor factor_;
  Number scale_;
  std::conditional_t<kWork == RowWork::kPlain, acc_t, Number> of_target_;
};

// The second pass over a row. Packs start at boundaries of the gradient: every 16 bytes, or every 8
// if the gradient is half as wide as the logits. If the gradient overwrites the logits, both have
// the same boundaries, so a thread reads from memory only the bytes that it writes next. A pack in
// shared memory may have been kept by another thread. So teams synchronise between the passes, and
// at the end of this function before the next row is kept.
template <RowWork kWork, typename scalar_t, typename grad_t, typename Team>
__device__ __forceinline__ void write_gradient(const Team& team,
                                               const PackGradient<kWork, scalar_t>& gradient,
                                               const scalar_t* in, const RowsAt&, int classes,
                                               const KeptPacks<scalar_t>& kept, grad_t* out,
                                               const RowsAt&) {
  using P = Pack<scalar_t>;
  const Pieces<grad_t, P::kSize> pieces(out, classes);
  const int row_packs = classes / P::kSize;
  const int kept_classes = P::kSize * (kept.count < row_packs ? kept.count : row_packs);
  const auto* const kept_elements = reinterpret_cast<const scalar_t*>(kept.packs());
  const auto write = [&](int first, const auto& pack) {
    store_gradient<Team::kIsWide>(out + first, gradient.template of<grad_t>(first, pack));
  };
  const auto write_kept = [&](int first, const auto& pack) {
    store_gradient<Team::kIsWide>(out + first, gradient.template of_kept<grad_t>(first, pack));
  };
  pieces.each_single(team, [&](int c) {
    if (c < kept_classes) {
      write_kept(c, Pack<scalar_t, 1>{{kept_elements[c]}});
    } else {
      write(c, Pack<scalar_t, 1>{{in[c]}});
    }
  });
  const int from_kept = kept_classes == 0 ? 0 : (kept_classes - pieces.head) / P::kSize;
  // Write the packs that are not in shared memory first: they were read last, so they are the most
  // likely to be still in the L2 cache.
  each_pack<kWriteUnroll<scalar_t>>(
      team, PacksAnywhere<scalar_t>(in + pieces.head), from_kept, pieces.packs, [] {},
      [&](int p, const P& pack) { write(pieces.first_of(p), pack); });
  if (kept.count == 0) return;
  // inner() is safe: a pack whose elements are all kept lies in 16-byte blocks that are kept too.
  const PacksAnywhere<scalar_t> kept_packs(kept_elements + pieces.head);
  for (int p = team.index(); p < from_kept; p += Team::kSize) {
    write_kept(pieces.first_of(p), kept_packs.inner(p));
  }
  // With head = 0 each thread has read only packs that it kept itself, so it need not wait.
  if (pieces.head != 0) team.sync();
}

}  // namespace ampfuse
