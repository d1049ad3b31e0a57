// Walks over consecutive elements with 16-byte accesses, the widest before Blackwell, and single
// elements before the first and after the last 16-byte boundary.
#pragma once

#include <cstdint>
#include <type_traits>

#include "launch.cuh"

namespace ampfuse {

// Consecutive elements that are moved at once, 16 bytes of them or less.
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

// Consecutive elements, of a row say, in pieces: single ones before the first 16-byte boundary and
// behind the last one, packs between. A thread of a team always has the same pieces, whatever it
// does with them.
template <typename scalar_t>
struct Pieces {
  using P = Pack<scalar_t>;

  int head;
  int packs;
  int count;

  // All single elements where there are to be no packs.
  __device__ Pieces(const scalar_t* data, int count, bool in_packs) : count(count) {
    // Aligned to their own type, so that this many lie before the next 16-byte boundary.
    const int past =
        static_cast<int>(reinterpret_cast<uintptr_t>(data) % sizeof(P) / sizeof(scalar_t));
    const int until_aligned = past == 0 ? 0 : P::kSize - past;
    head = !in_packs || until_aligned > count ? count : until_aligned;
    packs = (count - head) / P::kSize;
  }

  __device__ int first_of(int pack) const { return head + pack * P::kSize; }

  // Calls visit(place) for the single elements.
  template <typename Team, typename Visit>
  __device__ __forceinline__ void each_single(const Team& team, const Visit& visit) const {
#pragma unroll 1
    for (int i = team.index(); i < head; i += Team::kSize) visit(i);
#pragma unroll 1
    for (int i = first_of(packs) + team.index(); i < count; i += Team::kSize) visit(i);
  }

  // Calls visit(number of the pack, pack) for the packs [begin, end), `begin` a multiple of the
  // team's size, from `body`, where the first of all packs is. Each thread has kUnroll packs on
  // their way before it uses the first.
  template <int kUnroll, typename Team, typename Visit>
  __device__ __forceinline__ static void each_pack(const Team& team, const P* body, int begin,
                                                   int end, const Visit& visit) {
    int p = begin + team.index();
    for (; p + (kUnroll - 1) * Team::kSize < end; p += kUnroll * Team::kSize) {
      P pack[kUnroll];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) pack[u] = body[p + u * Team::kSize];
#pragma unroll
      for (int u = 0; u < kUnroll; ++u) visit(p + u * Team::kSize, pack[u]);
    }
#pragma unroll 1
    for (; p < end; p += Team::kSize) visit(p, body[p]);
  }
};

enum class Access { kRead, kReadWrite };

// Calls visit(x) for every element of data[0, count), from the warp's 32 lanes: lane l sees every
// 32nd pack. With kReadWrite, visit takes x by reference and what it leaves there is stored.
//
// Each lane has kUnroll packs, 64 bytes, on their way before it uses the first (launch.cuh has the
// sum for a multiprocessor).
template <Access kAccess, typename scalar_t, typename Visit>
__device__ __forceinline__ void visit_elements(scalar_t* data, int count, int lane, Visit visit) {
  using P = Pack<scalar_t>;
  constexpr int kUnroll = 4;

  const Pieces<scalar_t> pieces(data, count, /*in_packs=*/true);
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
