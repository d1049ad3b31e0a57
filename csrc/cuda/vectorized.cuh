// Loops over consecutive elements with 16-byte accesses, the widest before Blackwell, and with
// single elements before the first and after the last 16-byte boundary. PacksAnywhere loads packs
// that cross these boundaries.
#pragma once

#include <cstdint>
#include <type_traits>
#include <utility>

#include "launch.cuh"

namespace ampfuse {

// Consecutive elements that one thread moves at once, at most 16 bytes.
template <typename T, int kCount = 16 / sizeof(T)>
struct alignas(kCount * sizeof(T)) Pack {
  static_assert(16 % (kCount * sizeof(T)) == 0);
  static constexpr int kSize = kCount;
  T value[kSize];
};

template <int kCount, typename T>
__device__ __forceinline__ Pack<T, kCount> load_pack(const T* data) {
  return *reinterpret_cast<const Pack<T, kCount>*>(data);
}

template <typename T, int kCount>
__device__ __forceinline__ void store_pack(T* data, const Pack<T, kCount>& pack) {
  *reinterpret_cast<Pack<T, kCount>*>(data) = pack;
}

// Returns the number of elements between the last pack boundary and `data`, which must be aligned
// to its own type.
template <int kCount, typename T>
__device__ __forceinline__ int elements_past_boundary(const T* data) {
  constexpr int kBytes = kCount * sizeof(T);
  return static_cast<int>(reinterpret_cast<uintptr_t>(data) % kBytes / sizeof(T));
}

// Consecutive elements, for example a row, in three pieces: single elements before the first pack
// boundary, aligned packs, and single elements after the last boundary. Each of the two outer
// pieces is shorter than a pack.
template <typename scalar_t, int kCount = Pack<scalar_t>::kSize>
struct Pieces {
  using P = Pack<scalar_t, kCount>;

  int head;
  int packs;
  int count;

  __device__ Pieces(const scalar_t* data, int count) : count(count) {
    const int past = elements_past_boundary<kCount>(data);
    const int until_aligned = past == 0 ? 0 : P::kSize - past;
    head = until_aligned > count ? count : until_aligned;
    packs = (count - head) / P::kSize;
  }

  __device__ int first_of(int pack) const { return head + pack * P::kSize; }

  // Calls visit(index) for the single elements.
  template <typename Team, typename Visit>
  __device__ __forceinline__ void each_single(const Team& team, const Visit& visit) const {
    static_assert(Team::kSize >= P::kSize);
    const int tail = first_of(packs) + team.index();
    if (team.index() < head) visit(team.index());
    if (tail < count) visit(tail);
  }
};

// A loaded pack as 32-bit words. Separate 16-bit elements would take a register each.
struct Words {
  uint32_t word[4];
};

// Sets each low[u] to the 16 bytes at offset `bytes` of the 32 bytes (low[u], high[u]). The offset
// is the same for a whole row, so the code branches on it. Without a branch it would take fifteen
// selections per pack.
template <int kMultiple, int kCount>
__device__ __forceinline__ void shift(Words (&low)[kCount], const Words (&high)[kCount],
                                      int bytes) {
  const auto by = [&](auto constant) {
    constexpr int kWord = decltype(constant)::value / 4;
    constexpr int kBits = decltype(constant)::value % 4 * 8;
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const uint32_t w[] = {low[u].word[0],  low[u].word[1],  low[u].word[2],  low[u].word[3],
                            high[u].word[0], high[u].word[1], high[u].word[2], high[u].word[3]};
#pragma unroll
      for (int i = 0; i < 4; ++i) {
        const uint64_t pair = static_cast<uint64_t>(w[kWord + i + 1]) << 32 | w[kWord + i];
        low[u].word[i] = static_cast<uint32_t>(pair >> kBits);
      }
    }
    return true;
  };
  [&]<int... kPart>(std::integer_sequence<int, kPart...>) {
    ((bytes == (kPart + 1) * kMultiple &&
      by(std::integral_constant<int, (kPart + 1) * kMultiple>())) ||
     ...);
  }(std::make_integer_sequence<int, 16 / kMultiple - 1>());
}

// Packs of consecutive elements with any alignment, read with aligned 16-byte loads. If `data` is
// not on a boundary, a pack is assembled from the two aligned blocks that it overlaps. Neighbouring
// packs need the same blocks, and the next lane loads them at the same time. The L1 cache serves
// these repeated loads, so each byte is read from memory once.
//
// The blocks of the first and the last pack may also contain memory outside the elements, which
// another thread may be writing, or which may not be readable. These two packs are gathered from
// single elements.
template <typename scalar_t>
class PacksAnywhere {
 public:
  using P = Pack<scalar_t>;

  __device__ explicit PacksAnywhere(const scalar_t* data)
      : blocks_(reinterpret_cast<const P*>(data - elements_past_boundary<P::kSize>(data))),
        past_(elements_past_boundary<P::kSize>(data)) {}

  __device__ bool are_aligned() const { return past_ == 0; }

  // Returns pack p, which must be neither the first nor the last one unless packs are aligned.
  __device__ __forceinline__ P inner(int p) const {
    return __builtin_bit_cast(P, are_aligned() ? block(p) : assembled(block(p), p));
  }

  // Returns n, where load() may read the packs [0, n) of `packs`: all if they are aligned, else all
  // but the last one. Of only two it may read none, since pack 1 takes the place of pack 0 in
  // load().
  __device__ int loadable(int packs) const {
    return are_aligned() ? packs : packs > 2 ? packs - 1 : 0;
  }

  // Returns pack p of `count` elements, with `fill` in place of those past the end.
  __device__ __forceinline__ P until_end(int p, int count, scalar_t fill) const {
    P pack;
#pragma unroll
    for (int e = 0; e < P::kSize; ++e) {
      const int i = p * P::kSize + e;
      pack.value[e] = i < count ? data()[i] : fill;
    }
    return pack;
  }

  // Returns pack p of `packs`.
  __device__ __forceinline__ P any(int p, int packs) const {
    return are_aligned() || (p > 0 && p < packs - 1) ? inner(p) : gathered(p);
  }

  // Loads packs at(0), at(1), …, all in flight at once. All indices must be below loadable(). If
  // packs are not aligned and at(u) is 0 for u > 0, packs[u] gets pack 1 instead.
  template <int kCount, typename At>
  __device__ __forceinline__ void load(const At& at, Words (&packs)[kCount]) const {
    if (are_aligned()) {
#pragma unroll
      for (int u = 0; u < kCount; ++u) packs[u] = block(at(u));
      return;
    }
    // Pack 0 is gathered below. Until then pack 1 takes its place.
    Words next[kCount];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
      const int p = max(at(u), 1);
      packs[u] = block(p);
      next[u] = block(p + 1);
    }
    shift<sizeof(scalar_t)>(packs, next, past_ * int(sizeof(scalar_t)));
    if (at(0) == 0) packs[0] = __builtin_bit_cast(Words, gathered(0));
  }

  // The same for packs that are not aligned, with half as many registers: only the lower blocks are
  // in flight at once. The upper block of a pack is the lower block of the next one, so by then it
  // is in the L1 cache, except that of the last loadable pack. Pack 1 takes the place of pack 0.
  template <int kCount, typename At>
  __device__ __forceinline__ void load_unaligned(const At& at, Words (&packs)[kCount]) const {
    const auto index = [&](int u) { return max(at(u), 1); };
#pragma unroll
    for (int u = 0; u < kCount; ++u) packs[u] = block(index(u));
#pragma unroll
    for (int u = 0; u < kCount; ++u) packs[u] = assembled(packs[u], index(u));
  }

 private:
  __device__ const scalar_t* data() const {
    return reinterpret_cast<const scalar_t*>(blocks_) + past_;
  }

  __device__ __forceinline__ Words block(int p) const {
    const P pack = blocks_[p];  // not read through a cast, so that sanitizers see the access
    return __builtin_bit_cast(Words, pack);
  }

  // Returns pack p, given its lower block.
  __device__ __forceinline__ Words assembled(const Words& low, int p) const {
    Words pack[] = {low};
    shift<sizeof(scalar_t)>(pack, {block(p + 1)}, past_ * int(sizeof(scalar_t)));
    return pack[0];
  }

  __device__ __forceinline__ P gathered(int p) const {
    P pack;
#pragma unroll
    for (int e = 0; e < P::kSize; ++e) pack.value[e] = data()[p * P::kSize + e];
    return pack;
  }

  const P* blocks_;
  int past_;
};

// Calls visit(index of the pack, pack) for the packs [begin, end), where end − 1 is the last pack
// of the data. Each thread visits its own packs in ascending order, with kUnroll loads in flight
// before it uses the first. It calls start() before the first visit, while these loads are in
// flight.
template <int kUnroll, typename Team, typename scalar_t, typename Start, typename Visit>
__device__ __forceinline__ void each_pack(const Team& team, const PacksAnywhere<scalar_t>& packs,
                                          int begin, int end, const Start& start,
                                          const Visit& visit) {
  constexpr int kStep = Team::kSize;
  int p = begin + team.index();
  if constexpr (kUnroll > 1) {
    // All loads of a round are in flight at once, also those of the last round, which may have
    // fewer packs. If packs are unaligned, the last one is gathered below, and if there are only
    // two, the first one as well.
    const int inner_end = max(begin, packs.loadable(end));
    if (p >= inner_end) start();
    for (const int first = p; p < inner_end; p += kUnroll * kStep) {
      Words words[kUnroll];
      // Other threads may be overwriting the packs that are not visited, so the first pack of the
      // round is loaded again in their place.
      packs.load([&](int u) { return p + u * kStep < inner_end ? p + u * kStep : p; }, words);
      if (p == first) start();
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) {
        if (u > 0 && p + u * kStep >= inner_end) break;
        visit(p + u * kStep, __builtin_bit_cast(Pack<scalar_t>, words[u]));
      }
    }
    p -= (p - inner_end) / kStep * kStep;  // back to this thread's first pack from inner_end on
  } else {
    start();
  }
#pragma unroll 1
  for (; p < end; p += kStep) visit(p, packs.any(p, end));
}

enum class Access { kRead, kReadWrite };

// Calls visit(x) for every element of data[0, count); all 32 lanes of a warp must call it, and each
// lane visits every 32nd pack. With kReadWrite, visit takes x by reference, and the new value is
// stored.
//
// Each lane has kUnroll packs, 64 bytes, in flight before it uses the first (launch.cuh computes
// the total for a multiprocessor).
template <Access kAccess, typename scalar_t, typename Visit>
__device__ __forceinline__ void visit_elements(scalar_t* data, int count, int lane, Visit visit) {
  using P = Pack<scalar_t>;
  constexpr int kUnroll = 4;

  const Pieces<scalar_t> pieces(data, count);
  const int head = pieces.head;
  const int packs = pieces.packs;
  const int tail = pieces.first_of(packs);

  const auto visit_one = [&](int i) {
    scalar_t x = data[i];
    visit(x);
    if constexpr (kAccess == Access::kReadWrite) data[i] = x;
  };
  if (lane < head) visit_one(lane);

  P* const body = reinterpret_cast<P*>(data + head);
  const auto visit_packs = [&](int first, auto unroll) {
    constexpr int kCount = decltype(unroll)::value;
    P pack[kCount];
#pragma unroll
    for (int u = 0; u < kCount; ++u) pack[u] = body[first + u * kWarp];
#pragma unroll
    for (int u = 0; u < kCount; ++u) {
#pragma unroll
      for (int e = 0; e < P::kSize; ++e) visit(pack[u].value[e]);
      if constexpr (kAccess == Access::kReadWrite) body[first + u * kWarp] = pack[u];
    }
  };
  int p = lane;
  for (; p + (kUnroll - 1) * kWarp < packs; p += kUnroll * kWarp) {
    visit_packs(p, std::integral_constant<int, kUnroll>());
  }
  for (; p < packs; p += kWarp) visit_packs(p, std::integral_constant<int, 1>());

  if (tail + lane < count) visit_one(tail + lane);
}

}  // namespace ampfuse
