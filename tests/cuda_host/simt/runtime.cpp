// The functions that device code calls, forwarded to the running block.

#include "simt/runtime.h"

#include <string>

#include "simt/block.h"

namespace simt::runtime {
namespace {

Block& block() {
  if (!current) throw Error("simt: a device function was called outside of a kernel");
  return *current;
}

}  // namespace

unsigned lane() {
  return block().lane();
}

void barrier(const Site& where) {
  block().barrier(where);
}

std::uint64_t warp_collective(const WarpCall& call) {
  return block().warp_collective(call);
}

void* shared_array(const void* key, std::size_t bytes, std::size_t alignment) {
  void* data = block().shared().find_or_make(key, bytes, alignment);
  if (!data) {
    block().fail("more shared memory than 48 KiB static, or 227 KiB in all");
    block().leave();
  }
  return data;
}

void* dynamic_shared_array() {
  return block().shared().dynamic();
}

void fence() {
  block().running().fenced = true;
}

// Host code may use atomics too, while no block is running.
void before_atomic(const void* address) {
  if (current && current->running().fenced) release(address);
}

void after_atomic(const void* address) {
  if (current) acquire(address);
}

void fault(const char* what, const Site& where) {
  block().fail(std::string(what) + ", " + to_string(where) + ", lane " +
               std::to_string(block().lane()) + ", thread " + std::to_string(thread_index.x));
  block().leave();
}

}  // namespace simt::runtime
