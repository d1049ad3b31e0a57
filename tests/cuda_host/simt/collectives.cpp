// Barriers and warp operations, in which threads of a block wait for each other.

#include <bit>

#include "simt/block.h"

namespace simt::runtime {

void Block::barrier(const Site& where) {
  Thread& self = running();
  self.state = Thread::State::at_barrier;
  self.call = "__syncthreads";
  self.where = where;
  if (waiting_ == 0) barrier_line_ = where;
  ++waiting_;
  if (!same_line(where, barrier_line_))
    fail("divergent barrier: threads wait at different lines" + describe(threads_));
  open_barrier_if_complete();
  hand_over();
}

// On Volta and later, a barrier does not wait for threads that have exited. A thread that is
// missing has most often left in the middle of the block's common work, because the trip count of a
// loop differs between threads. The hardware accepts that and pairs the barriers wrongly.
void Block::open_barrier_if_complete() {
  if (waiting_ == 0 || waiting_ + exited_ < threads_.size()) return;
  if (exited_ > 0)
    fail("divergent barrier: " + std::to_string(waiting_) + " threads wait, " +
         std::to_string(exited_) + " exited" + describe(threads_));
  std::vector<Fiber*> met;
  met.reserve(waiting_);
  for (Thread& thread : threads_) {
    if (thread.state != Thread::State::at_barrier) continue;
    met.push_back(thread.fiber);
    wake(thread);
  }
  met.front()->order(met, met);
  waiting_ = 0;
}

std::uint64_t Block::warp_collective(const WarpCall& call) {
  Thread& self = running();
  const unsigned warp = running_ / warpSize;
  const auto named = [&](unsigned lane) { return (call.mask >> lane & 1) != 0; };
  const auto refuse = [&](const std::string& why) {
    fail(std::string(call.name) + ", " + to_string(call.where) + ": lane " +
         std::to_string(lane()) + " of warp " + std::to_string(warp) + why + " its mask, " +
         hexadecimal(call.mask));
  };
  if (!named(lane()))
    refuse(" is not in");
  else if (call.source != kAny && !named(static_cast<unsigned>(call.source)))
    refuse(" reads lane " + std::to_string(call.source) + ", which is not in");
  if (failure_) leave();

  self.state = Thread::State::in_warp;
  self.call = call.name;
  self.where = call.where;
  self.mask = call.mask;
  self.source = call.source;
  self.value = call.value;
  lanes_waiting_[warp] |= 1u << lane();
  if (all_lanes_arrived(warp, call)) deliver(warp, call);
  hand_over();
  return self.value;
}

// A lane that waits with another mask or at another line may still make this call later.
bool Block::all_lanes_arrived(unsigned warp, const WarpCall& call) const {
  if ((lanes_waiting_[warp] & call.mask) != call.mask) return false;
  for (unsigned lanes = call.mask; lanes != 0; lanes &= lanes - 1) {
    const Thread& thread = threads_[warp * warpSize + std::countr_zero(lanes)];
    if (thread.mask != call.mask || !same_line(thread.where, call.where)) return false;
  }
  return true;
}

// Hands out all results at once: the first lane to continue may already send its next value.
void Block::deliver(unsigned warp, const WarpCall& call) {
  std::uint64_t sent[warpSize];
  Fiber* met[warpSize];
  unsigned count = 0;
  bool is_any = false;
  const auto for_each_lane = [&](auto&& body) {
    for (unsigned lanes = call.mask; lanes != 0; lanes &= lanes - 1) {
      const int lane = std::countr_zero(lanes);
      body(lane, threads_[warp * warpSize + lane]);
    }
  };
  for_each_lane([&](int lane, Thread& thread) {
    sent[lane] = thread.value;
    is_any = is_any || thread.value != 0;
    met[count++] = thread.fiber;
  });
  if (call.orders_memory) met[0]->order({met, count}, {met, count});
  for_each_lane([&](int, Thread& thread) {
    thread.value = thread.source == kAny ? is_any : sent[thread.source];
    wake(thread);
  });
  lanes_waiting_[warp] &= ~call.mask;
}

}  // namespace simt::runtime
