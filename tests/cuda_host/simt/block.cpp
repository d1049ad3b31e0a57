#include "simt/block.h"

#include "simt/sanitizers.h"

namespace simt::runtime {

Block* current = nullptr;

Block::Block(const Launch& launch, unsigned index, std::deque<Fiber>& pool, std::size_t first,
             Random& random)
    : launch_(launch),
      index_(index),
      ready_(launch.schedule.order, launch.block, random),
      shared_(launch.dynamic_shared_bytes) {
  threads_.reserve(launch.block);
  for (unsigned i = 0; i < launch.block; ++i) {
    Fiber& fiber = pool[(first + i) % pool.size()];
    if (kTsan)
      fiber.set_name(("block " + std::to_string(index) + " thread " + std::to_string(i)).c_str());
    threads_.push_back({.fiber = &fiber});
    ready_.insert(i);
  }
}

void Block::run(Fiber& host) {
  host_ = &host;
  current = this;
  block_index = {index_};
  block_dim = {launch_.block};
  grid_dim = {launch_.grid};
  activate(ready_.take());
  host.switch_to(*running().fiber);
  current = nullptr;
  if (failure_) std::rethrow_exception(failure_);
}

// A fiber outlives the block: when its thread has ended, it runs a thread of a later block.
void Block::fiber_main() {
  for (;;) current->run_thread();
}

void Block::run_thread() {
  try {
    launch_.kernel.invoke(launch_.kernel.arguments);
  } catch (...) {
    failure_ = std::current_exception();
  }
  running().state = Thread::State::exited;
  ++exited_;
  open_barrier_if_complete();
  hand_over(/*finished=*/true);
}

void Block::activate(unsigned thread) {
  running_ = thread;
  thread_index = {thread};
}

void Block::hand_over(bool finished) {
  Fiber& self = *running().fiber;
  const unsigned next = ready_.take();
  // A barrier opens when its last thread arrives, so some thread still waits in a warp operation.
  if (next == ReadySet::kNone && exited_ < threads_.size())
    fail("a warp operation waits for lanes that never arrive" + describe(threads_));
  if (failure_) leave();
  if (next == running_) return;
  if (next == ReadySet::kNone) {
    self.switch_to(*host_, finished);
  } else {
    activate(next);
    self.switch_to(*running().fiber, finished);
  }
}

void Block::fail(const std::string& what) {
  if (failure_) return;
  failure_ = std::make_exception_ptr(Error("simt: block " + std::to_string(index_) + " of " +
                                           std::to_string(threads_.size()) + " threads, schedule " +
                                           launch_.schedule.name() + ": " + what));
}

void Block::leave() {
  running().fiber->switch_to(*host_, /*finished=*/true);
  __builtin_unreachable();
}

void Block::wake(Thread& thread) {
  thread.state = Thread::State::ready;
  ready_.insert(static_cast<unsigned>(&thread - threads_.data()));
}

}  // namespace simt::runtime
