// Barriers and warp operations.
//
// They are stricter than the hardware, whose leniency only hides mistakes:
// - all callers of one barrier or one warp operation must be at the same line;
// - every lane in a mask must arrive, including lanes that exited and lanes beyond the block's end
//   (CUDA lets a sync pass without them, but a shuffle reads undefined values from them);
// - a thread may exit before its first barrier; after that it must take part in every barrier
//   (collectives.cpp).
#pragma once

#include <bit>
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
      {"__syncwarp", mask, 0, simt::runtime::kBallot, /*orders_memory=*/true, where});
}

namespace simt {

// The lanes of a vote or shuffle wait for each other but do not order memory, as CUDA documents.
inline unsigned vote(const char* name, unsigned mask, bool predicate, runtime::Site where) {
  return static_cast<unsigned>(runtime::warp_collective(
      {name, mask, predicate, runtime::kBallot, /*orders_memory=*/false, where}));
}

template <class T>
T shuffle(const char* name, unsigned mask, T value, unsigned source, runtime::Site where) {
  static_assert(std::is_trivially_copyable_v<T> && (sizeof(T) == 4 || sizeof(T) == 8),
                "shuffles move 4 or 8 bytes");
  std::uint64_t bits = 0;
  std::memcpy(&bits, &value, sizeof value);
  bits = runtime::warp_collective(
      {name, mask, bits, static_cast<int>(source), /*orders_memory=*/false, where});
  std::memcpy(&value, &bits, sizeof value);
  return value;
}

// The lanes that the running lane may read: `width` lanes from `start` on.
struct Segment {
  Segment(int width_, runtime::Site where) : width(static_cast<unsigned>(width_)) {
    if (width < 1 || width > 32 || !std::has_single_bit(width))
      runtime::fault("shuffle width is not a power of two up to 32", where);
    start = lane & ~(width - 1);
  }
  // If the source is past the end of the segment, CUDA returns the caller's own value.
  unsigned clamp(unsigned source) const { return source < start + width ? source : lane; }

  unsigned lane = runtime::lane();
  unsigned width;
  unsigned start;
};

}  // namespace simt

template <class T>
T __shfl_sync(unsigned mask, T value, int source, int width = warpSize,
              simt::runtime::Site where = simt::runtime::Site::current()) {
  const simt::Segment segment(width, where);
  const unsigned wrapped = static_cast<unsigned>(source) & (segment.width - 1);
  return simt::shuffle("__shfl_sync", mask, value, segment.start + wrapped, where);
}

template <class T>
T __shfl_up_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                 simt::runtime::Site where = simt::runtime::Site::current()) {
  const simt::Segment segment(width, where);
  const bool inside = segment.lane - segment.start >= delta;
  return simt::shuffle("__shfl_up_sync", mask, value, segment.lane - (inside ? delta : 0), where);
}

template <class T>
T __shfl_down_sync(unsigned mask, T value, unsigned delta, int width = warpSize,
                   simt::runtime::Site where = simt::runtime::Site::current()) {
  const simt::Segment segment(width, where);
  return simt::shuffle("__shfl_down_sync", mask, value, segment.clamp(segment.lane + delta), where);
}

// Reads from earlier segments, as the hardware does, but not from later ones.
template <class T>
T __shfl_xor_sync(unsigned mask, T value, int lane_mask, int width = warpSize,
                  simt::runtime::Site where = simt::runtime::Site::current()) {
  const simt::Segment segment(width, where);
  const unsigned source = segment.lane ^ static_cast<unsigned>(lane_mask);
  return simt::shuffle("__shfl_xor_sync", mask, value, segment.clamp(source), where);
}

inline unsigned __ballot_sync(unsigned mask, int predicate,
                              simt::runtime::Site where = simt::runtime::Site::current()) {
  return simt::vote("__ballot_sync", mask, predicate != 0, where);
}
inline int __any_sync(unsigned mask, int predicate,
                      simt::runtime::Site where = simt::runtime::Site::current()) {
  return simt::vote("__any_sync", mask, predicate != 0, where) != 0;
}
inline int __all_sync(unsigned mask, int predicate,
                      simt::runtime::Site where = simt::runtime::Site::current()) {
  return simt::vote("__all_sync", mask, predicate == 0, where) == 0;
}

// Returns the least that the hardware promises: no other lane is known to be converged with the
// caller.
inline unsigned __activemask() {
  return 1u << simt::runtime::lane();
}
