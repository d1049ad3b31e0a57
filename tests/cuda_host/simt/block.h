// One block of a grid, whose threads take turns on fibers.
//
// A thread runs until it waits or exits, then switches directly to the next ready thread. This
// class needs no locks: a single host thread runs all fibers, and switches only in this class.
#pragma once

#include <deque>
#include <exception>
#include <span>
#include <string>
#include <vector>

#include "simt/fiber.h"
#include "simt/launch.h"
#include "simt/ready_set.h"
#include "simt/shared_memory.h"

namespace simt::runtime {

// One CUDA thread of the running block, and the call in which it waits.
struct Thread {
  enum class State { ready, at_barrier, in_warp, exited };

  Fiber* fiber;
  State state = State::ready;
  bool fenced = false;

  // The call in which the thread waits, unless it is ready or has exited. For a warp operation also
  // its operands and result.
  const char* call = nullptr;
  Site where = {};
  unsigned mask = 0;
  int source = 0;
  std::uint64_t value = 0;
};

bool same_line(const Site&, const Site&);

std::string to_string(const Site&);  // file:line
std::string hexadecimal(unsigned);   // 0x0000ffff

// Describes the state of all threads for a report: a line per group of lanes of a warp.
std::string describe(std::span<const Thread>);

class Block {
 public:
  // Threads run on pool[first], pool[first + 1] and so on, wrapping around at the end of the pool.
  Block(const Launch&, unsigned index, std::deque<Fiber>& pool, std::size_t first, Random&);

  // The function that every fiber of the pool runs.
  static void fiber_main();

  // Runs all threads to their end. If one fails, throws its error and abandons the others.
  void run(Fiber& host);

  Thread& running() { return threads_[running_]; }
  unsigned lane() const { return running_ % warpSize; }
  SharedMemory& shared() { return shared_; }

  void barrier(const Site&);
  std::uint64_t warp_collective(const WarpCall&);

  // Records the first failure. The running thread continues until hand_over() or leave(), so that
  // the caller can free the message: leave() never returns and does not unwind.
  void fail(const std::string& what);
  [[noreturn]] void leave();

 private:
  void run_thread();
  void hand_over(bool finished = false);
  void activate(unsigned thread);
  void open_barrier_if_complete();
  bool all_lanes_arrived(unsigned warp, const WarpCall&) const;
  void deliver(unsigned warp, const WarpCall&);
  void wake(Thread&);

  const Launch& launch_;
  unsigned index_;
  std::vector<Thread> threads_;
  ReadySet ready_;
  SharedMemory shared_;
  Fiber* host_ = nullptr;
  std::exception_ptr failure_;

  unsigned running_ = 0;
  unsigned exited_ = 0;

  unsigned lanes_waiting_[kMaxThreads / warpSize] = {};  // lanes in a warp operation

  // State of the barrier in which threads are waiting.
  unsigned waiting_ = 0;
  Site barrier_line_ = {};
};

// The running block, or nullptr.
extern Block* current;

}  // namespace simt::runtime
