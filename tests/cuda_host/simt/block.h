// One block of a grid: its threads take turns on fibers.
//
// A thread runs until it waits or exits, then hands over straight to the next ready one. Nothing
// here is thread-safe: there is one host thread, and it switches fibers only in here.
#pragma once

#include <deque>
#include <exception>
#include <string>
#include <vector>

#include "simt/launch.h"
#include "simt/ready_set.h"
#include "simt/shared_memory.h"
#include "simt/thread.h"

namespace simt::runtime {

struct Launch {
  Kernel kernel;
  dim3 grid;
  dim3 block;
  std::size_t dynamic_shared_bytes;
  Schedule schedule;
};

class Block {
 public:
  // Its threads run on pool[first], pool[first + 1] and so on, round the pool's end.
  Block(const Launch&, uint3 index, std::deque<Fiber>& pool, std::size_t first, Random&);

  // What every fiber of the pool runs.
  static void fiber_main();

  // Runs all threads to their end, or until one fails: then throws that, abandoning the rest.
  void run(Fiber& host);

  Thread& running() { return threads_[running_]; }
  unsigned lane() const { return running_ % warpSize; }
  SharedMemory& shared() { return shared_; }

  int barrier(const char* name, bool predicate, const Site&);
  std::uint64_t warp_collective(const WarpCall&);

  // Notes the first failure. The running thread goes on until it hands over or leaves, so that
  // whoever composed the message can free it: leave() never returns, and unwinds nothing.
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
  uint3 index_;
  std::vector<Thread> threads_;
  ReadySet ready_;
  SharedMemory shared_;
  Fiber* host_ = nullptr;
  std::exception_ptr failure_;

  unsigned running_ = 0;
  unsigned exited_ = 0;
  unsigned exited_late_ = 0;  // after their first barrier

  unsigned lanes_waiting_[kMaxThreads / warpSize] = {};  // in a warp operation

  // Of the barrier that threads are waiting in.
  unsigned waiting_ = 0;
  Site barrier_line_ = {};
  int votes_ = 0;
  int last_votes_ = 0;  // of the barrier before, for those who have not left it yet
};

// The one that is running, or nullptr.
extern Block* current;

}  // namespace simt::runtime
