// What the device-side headers and launch.h ask of the scheduler. Not for kernels or tests.
#pragma once

#include <cstddef>
#include <cstdint>
#include <source_location>

#include "simt/keywords.h"

namespace simt {
struct Schedule;
}

namespace simt::runtime {

using Site = std::source_location;

// A kernel with its arguments bound: `invoke(arguments)` is one CUDA thread.
struct Kernel {
  void (*invoke)(void* arguments);
  void* arguments;
};

// Runs the whole grid. Throws Error, or what the kernel threw.
void run(const Kernel&, dim3 grid, dim3 block, std::size_t dynamic_shared_bytes, const Schedule&);

// Lane of the running CUDA thread within its warp.
unsigned lane();

// Waits for the block; returns for how many threads `predicate` held.
int barrier(const char* name, bool predicate, const Site&);

// Among the lanes of `mask`, which must all make the same call from the same line.
struct WarpCall {
  const char* name;
  unsigned mask;
  std::uint64_t value;
  int source;  // the lane whose value to return, or kBallot
  bool orders_memory;
  Site where;
};
inline constexpr int kBallot = -1;  // return one bit per lane: was its value non-zero?
std::uint64_t warp_collective(const WarpCall&);

// The block's array of the declaration `key`, made at its first use.
void* shared_array(const void* key, std::size_t bytes, std::size_t alignment);
void* dynamic_shared_array();

// __threadfence, and the two sides of an atomic operation at `address`.
void fence();
void before_atomic(const void* address);
void after_atomic(const void* address);

// Ends the launch with an Error that names the running CUDA thread.
[[noreturn]] void fault(const char* what, const Site&);

}  // namespace simt::runtime
