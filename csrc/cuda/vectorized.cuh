// A warp walks over consecutive elements with 16-byte accesses, the widest before Blackwell, and
// single elements before the first and after the last 16-byte boundary.
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

  // data is aligned to its own type, so this many elements lie before the next 16-byte boundary.
  const int past =
      static_cast<int>(reinterpret_cast<uintptr_t>(data) % sizeof(P) / sizeof(scalar_t));
  const int aligned_at = past == 0 ? 0 : P::kSize - past;
  const int head = aligned_at < count ? aligned_at : count;
  const int packs = (count - head) / P::kSize;
  const int tail = head + packs * P::kSize;

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
