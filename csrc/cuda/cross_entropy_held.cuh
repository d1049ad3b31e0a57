// A row of 16-bit logits that a team holds in registers between the two passes. Its logits are read
// from memory once. Shared memory only serves the parts of a gradient that are not whole, aligned
// packs.
#pragma once

#include "cross_entropy_gradient.cuh"

namespace ampfuse {

template <RowWork kWork, typename scalar_t, typename Team>
class HeldRow {
 public:
  using P = Pack<scalar_t>;

  // A thread requests all of its packs, 64 or 128 bytes, before it uses the first. The registers of
  // a multiprocessor serve 1024 threads with 4 packs each, or 512 threads with 8.
  static constexpr int kPacks = kWork == RowWork::kHeldTwice ? 8 : 4;
  static constexpr int64_t kMostClasses = int64_t(kPacks) * P::kSize * Team::kSize;

  // Shared memory has room for `count` packs of each team's row: all of them, or 0 if no gradient
  // is wanted.
  __device__ explicit HeldRow(int count) : count_(count) {}

  // Requests a row of at most kMostClasses logits, with −∞ past its end.
  __device__ __forceinline__ void load(const Team& team, const scalar_t* in, int classes) {
    const PacksAnywhere<scalar_t> packs(in);
    const int loaded = packs.loadable(classes / P::kSize);
    const auto loaded_at = [&](int u) { return min(at(team, u), loaded - 1); };
    if (packs.are_aligned()) {
      if (loaded > 0) packs.load(loaded_at, words_);
    } else if (loaded > 0) {
      packs.load_unaligned(loaded_at, words_);
    }
    const bool lacks_first = !packs.are_aligned() && team.index() == 0;
    if (at(team, kPacks - 1) < loaded && !lacks_first) return;
    // The thread's packs before `rest` are loaded, except the first one of an unaligned row. Those
    // after it are past the end.
    const int rest = loaded + ((team.index() - loaded) & (Team::kSize - 1));
    const auto lowest = static_cast<scalar_t>(-HUGE_VALF);
    P none;
#pragma unroll
    for (scalar_t& x : none.value) x = lowest;
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      if (at(team, u) > rest) words_[u] = __builtin_bit_cast(Words, none);
    }
    // A loop takes fewer registers than reading both packs at once, which few threads do.
#pragma unroll 1
    for (int p = lacks_first ? 0 : rest;; p = rest) {
      const auto words = __builtin_bit_cast(Words, packs.until_end(p, classes, lowest));
#pragma unroll
      for (int u = 0; u < kPacks; ++u) {
        if (at(team, u) == p) words_[u] = words;
      }
      if (p == rest) return;
    }
  }

  // Replaces the logit of a class, if this thread holds it.
  __device__ __forceinline__ void set(const Team& team, int c, scalar_t x) {
    const int p = c / P::kSize;
    if ((p & (Team::kSize - 1)) != team.index()) return;
    stay_a_branch();
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      if (at(team, u) != p) continue;
      stay_a_branch();
      auto pack = __builtin_bit_cast(P, words_[u]);
#pragma unroll
      for (int e = 0; e < P::kSize; ++e) {
        if (at(team, u) * P::kSize + e == c) pack.value[e] = x;
      }
      words_[u] = __builtin_bit_cast(Words, pack);
    }
  }

  // Calls visit(index of the first class, pack) for the thread's packs, also for those past the
  // end. The team skips packs that are past the end for all of its threads. With kHeldTwice one
  // check skips the second half of the packs, since each check takes two instructions.
  template <typename Visit>
  __device__ __forceinline__ void each_pack(const Team& team, int classes,
                                            const Visit& visit) const {
#pragma unroll
    for (int u = 0; u < kPacks; ++u) {
      const bool is_checked = kWork == RowWork::kHeldTwice ? u == kPacks / 2 : u > 0;
      if (is_checked && u * Team::kSize * P::kSize >= classes) break;
      Words words = words_[u];
#if defined(__CUDA_ARCH__)
      // Otherwise nvcc converts the logits once and keeps floats for the second pass.
#pragma unroll
      for (uint32_t& word : words.word) asm volatile("" : "+r"(word));
#endif
      visit(at(team, u) * P::kSize, __builtin_bit_cast(P, words));
    }
  }

  // Replaces the thread's packs by compute(index of the first class, pack).
  template <typename Compute>
  __device__ __forceinline__ void replace(const Team& team, int classes, const Compute& compute) {
    int u = 0;
    each_pack(team, classes, [&](int first, const P& pack) {
      words_[u++] = __builtin_bit_cast(Words, compute(first, pack));
    });
  }

  // Stores the row. If `out` is aligned, whole packs are stored directly. All other packs go
  // through shared memory, from which the team stores them at the boundaries of `out`.
  __device__ __forceinline__ void store(const Team& team, scalar_t* out, int classes) const {
    const auto pack = [&](int u) { return __builtin_bit_cast(P, words_[u]); };
    const auto first = [&](int u) { return at(team, u) * P::kSize; };
    const bool is_aligned = elements_past_boundary<P::kSize>(out) == 0;
    if (is_aligned && first(kPacks - 1) + P::kSize <= classes) {
#pragma unroll
      for (int u = 0; u < kPacks; ++u) store_gradient<false>(out + first(u), pack(u));
    } else {
#pragma unroll
      for (int u = 0; u < kPacks; ++u) {
        if (is_aligned && first(u) + P::kSize <= classes) {
          store_gradient<false>(out + first(u), pack(u));
        } else if (first(u) < classes) {
          staged(team)[at(team, u)] = pack(u);
        }
      }
    }
    if (is_aligned && classes % P::kSize == 0) return;
    team.sync();
    const Pieces<scalar_t> pieces(out, classes);
    const auto* const elements = reinterpret_cast<const scalar_t*>(staged(team));
    pieces.each_single(team, [&](int c) { out[c] = elements[c]; });
    if (is_aligned) return;
    const PacksAnywhere<scalar_t> packs(elements + pieces.head);
    for (int p = team.index(); p < pieces.packs; p += Team::kSize) {
      // inner() is safe: all blocks that the pack overlaps are staged.
      store_gradient<false>(out + pieces.first_of(p), packs.inner(p));
    }
  }

 private:
  __device__ static int at(const Team& team, int u) { return team.index() + u * Team::kSize; }

  // The address is computed at each use, since threads have no register to keep it.
  __device__ P* staged(const Team& team) const {
    AMPFUSE_DYNAMIC_SHARED(uint4, shared);
    return reinterpret_cast<P*>(shared) + team.index_in_block() * count_;
  }

  int count_;
  Words words_[kPacks];
};

// The largest of some logits, and their sum of exponentials.
struct LogitSum {
  float largest;
  float sum;
};

// Combines the sums of a team's threads, each with its reference `own`. The result is relative to
// row_exponential(largest).
template <typename scalar_t, typename Team>
__device__ __forceinline__ LogitSum joined_sum(const Team& team,
                                               const RowExponential<scalar_t>& own,
                                               const LogitSum& mine) {
  const float largest = team_largest(team, mine.largest);
  return {largest, team_sum(team, mine.sum * row_exponential<scalar_t>(largest).from(own))};
}

// Combines sums as joined_sum does; the warps of a block exchange both numbers at once.
template <typename scalar_t, typename Team>
__device__ __forceinline__ LogitSum team_logit_sum(const Team& team,
                                                   const RowExponential<scalar_t>& own,
                                                   const LogitSum& mine) {
  if constexpr (Team::kSize <= kWarp) {
    return joined_sum(team, own, mine);
  } else {
    const LogitSum of_warp = joined_sum(WarpTeam(nullptr), own, mine);
    const double exchanged = team.of_warps(__builtin_bit_cast(double, of_warp));
    const auto other = __builtin_bit_cast(LogitSum, exchanged);
    return joined_sum(typename Team::Warps(nullptr), row_exponential<scalar_t>(other.largest),
                      other);
  }
}

// Each thread has a reference of its own, near the largest of its logits, so no thread waits for
// another one before it computes its exponentials.
template <RowWork kWork, typename scalar_t, typename Team>
__device__ __forceinline__ RowSums<scalar_t> read_row(const Team& team,
                                                      const CrossEntropyTable<scalar_t>& table,
                                                      int64_t row, int target, scalar_t, bool,
                                                      HeldRow<kWork, scalar_t, Team>& held) {
  held.load(team, table.template logits_of<Team>(row), table.classes);
  PackMaximum<scalar_t> largest_of_thread;
  held.each_pack(team, table.classes,
                 [&](int, const Pack<scalar_t>& pack) { largest_of_thread.add(pack); });
  const auto own = row_exponential<scalar_t>(largest_of_thread.get());
  // Looking for the target once takes fewer instructions than in each pack.
  constexpr bool kSetsTarget = kWork == RowWork::kHeldTwice;
  if (kSetsTarget) held.set(team, target, -HUGE_VALF);
  float sum_of_thread = 0;
  held.each_pack(team, table.classes, [&](int first, const Pack<scalar_t>& pack) {
    float terms[Pack<scalar_t>::kSize];
    widen(pack, terms);
    if (!kSetsTarget) leave_out(target, first, terms);
#pragma unroll
    for (float& x : terms) x = own.term(x);
    sum_of_thread += sum_in_pairs(terms);
  });
  const LogitSum total = team_logit_sum(team, own, {largest_of_thread.get(), sum_of_thread});
  const auto exponential = row_exponential<scalar_t>(total.largest);
  const auto reference = static_cast<float>(exponential.reference());
  return {{total.largest, reference, total.sum}, exponential, 1, 0};
}

// The gradient may overwrite the logits.
template <RowWork kArithmetic, RowWork kWork, typename scalar_t, typename Team>
__device__ __forceinline__ void write_gradient(const Team& team,
                                               const PackGradient<kArithmetic, scalar_t>& gradient,
                                               const scalar_t*, const RowsAt&, int classes,
                                               HeldRow<kWork, scalar_t, Team>& held, scalar_t* out,
                                               const RowsAt&) {
  held.replace(team, classes, [&](int first, const Pack<scalar_t>& pack) {
    if constexpr (kWork == RowWork::kHeldTwice) {
      return gradient.template of_others<scalar_t>(pack);
    } else {
      return gradient.template of<scalar_t>(first, pack);
    }
  });
  if (kWork == RowWork::kHeldTwice) held.set(team, gradient.target(), gradient.of_target());
  held.store(team, out, classes);
}

// Returns the object that keeps a row between the two passes; `count` packs fit in shared memory.
template <RowWork kWork, typename scalar_t, typename Team>
__device__ __forceinline__ auto kept_row(const Team& team, int count) {
  if constexpr (is_held(kWork)) {
    return HeldRow<kWork, scalar_t, Team>(count);
  } else {
    return kept_packs<scalar_t>(team, count);
  }
}

}  // namespace ampfuse
