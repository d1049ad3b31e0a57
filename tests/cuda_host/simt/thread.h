// One CUDA thread of the running block, and the call in which it waits.
#pragma once

#include <cstdint>
#include <span>
#include <string>

#include "simt/fiber.h"
#include "simt/keywords.h"
#include "simt/runtime.h"

namespace simt::runtime {

struct Thread {
  enum class State { ready, at_barrier, in_warp, in_cluster, exited };

  Fiber* fiber;
  uint3 index;
  State state = State::ready;
  bool fenced = false;
  unsigned barriers = 0;  // passed so far

  // The call in which the thread waits, unless it is ready or has exited. For a warp operation also
  // its operands and result.
  const char* call = nullptr;
  Site where = {};
  unsigned mask = 0;
  int source = 0;
  std::uint64_t value = 0;
  const void* inbox = nullptr;  // in wait_for_bytes
};

bool same_line(const Site&, const Site&);

std::string to_string(const Site&);      // file:line
std::string to_string(uint3);            // (x,y,z)
std::string hexadecimal(unsigned);       // 0x0000ffff
std::string lane_ranges(unsigned mask);  // 0-7,9

// Describes the state of all threads for a report: a line per group of lanes of a warp.
std::string describe(std::span<const Thread>);

}  // namespace simt::runtime
