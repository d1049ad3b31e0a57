// Barriers and warp operations.
//
// They are stricter than the hardware, whose leniency only hides mistakes:
// - all callers of one barrier or one warp operation must be at the same line;
// - every lane in a mask must arrive, including lanes that exited and lanes beyond the block's end
//   (CUDA lets a sync pass without them, but a shuffle reads undefined values from them);
// - all threads of a block must take part in every barrier (collectives.cpp).
#pragma once

#include <cstdint>
#include <cstring>
#include <type_traits>

#include "simt/runtime.h"

inline void __syncthreads(simt::runtime::Site where = simt::runtime::Site::current()) {
  simt::runtime::barrier(where);
}

inline void __syncwarp(unsigned mask = 0xffffffff,
                       simt::runtime::Site where = simt::runtime::Site::current()) {
  simt::runtime::warp_collective(
      {"__syncwarp", mask, 0, simt::runtime::kAny, /*orders_memory=*/true, where});
}

// The lanes of a vote or shuffle wait for each other but do not order memory, as CUDA documents.
inline int __any_sync(unsigned mask, int predicate,
                      simt::runtime::Site where = simt::runtime::Site::current()) {
  return static_cast<int>(simt::runtime::warp_collective(
      {"__any_sync", mask, predicate != 0, simt::runtime::kAny, /*orders_memory=*/false, where}));
}

template <class T>
T __shfl_xor_sync(unsigned mask, T value, unsigned lane_mask,
                  simt::runtime::Site where = simt::runtime::Site::current()) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8),
                "shuffles move 4 or 8 bytes");
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  const auto source = static_cast<int>((simt::runtime::lane() ^ lane_mask) % warpSize);
  bits = simt::runtime::warp_collective(
      {"__shfl_xor_sync", mask, bits, source, /*orders_memory=*/false, where});
  std::memcpy(&value, &bits, sizeof value);
  return value;
}
