// The interface of the scheduler for the device-side headers and launch.h, not for kernels or
// tests.
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

// A kernel with its arguments bound: `invoke(arguments)` runs one CUDA thread.
struct Kernel {
  void (*invoke)(void* arguments);
  void* arguments;
};

struct Launch {
  Kernel kernel;
  unsigned grid;   // blocks
  unsigned block;  // threads
  std::size_t dynamic_shared_bytes;
  const Schedule& schedule;
};

// Runs the whole grid. Throws Error, or the exception that the kernel threw.
void run(const Launch&);

// Returns the lane of the running CUDA thread within its warp.
unsigned lane();

// Waits for all threads of the block.
void barrier(const Site&);

// A warp operation among the lanes of `mask`, which must all make this call from the same line.
struct WarpCall {
  const char* name;
  unsigned mask;
  std::uint64_t value;
  int source;  // the lane whose value is returned, or kAny
  bool orders_memory;
  Site where;
};
inline constexpr int kAny = -1;  // returns 1 if the value of any lane is not 0
std::uint64_t warp_collective(const WarpCall&);

// Returns the block's array of the declaration `key`, creating it at its first use.
void* shared_array(const void* key, std::size_t bytes, std::size_t alignment);
void* dynamic_shared_array();

// Called for __threadfence, and before and after an atomic operation at `address`.
void fence();
void before_atomic(const void* address);
void after_atomic(const void* address);

// Ends the launch with an Error that names the running CUDA thread.
[[noreturn]] void fault(const char* what, const Site&);

}  // namespace simt::runtime
