// The blocks of a cluster, which take turns: a block runs until all of its threads wait for others
// of the cluster.
#pragma once

#include <deque>
#include <vector>

#include "simt/block.h"

namespace simt::runtime {

class Cluster {
 public:
  // Threads run on pool[first_fiber], pool[first_fiber + 1] and so on, as those of a Block.
  Cluster(const Launch&, unsigned first_block, std::deque<Fiber>& pool, std::size_t first_fiber,
          Random&);

  // Runs all blocks to their end. If a thread fails, throws its error and abandons all others.
  void run(Fiber& host);

  // These functions are called by the running thread (runtime.h).
  void sync(const Site&);
  void* in_block(int rank, const void* shared, const Site&);
  void announce(void* inbox, int bytes, const Site&);
  void receive(int rank, void* inbox, int bytes, const Site&);
  void wait(void* inbox, bool is_odd, const Site&);

 private:
  // Stores the state of an inbox of `block`, and wakes threads if it ends the phase.
  void update(Block& block, void* inbox, InboxState, const Site&);

  const Launch& launch_;
  Random& random_;
  std::deque<Block> blocks_;
  std::size_t waiting_ = 0;       // threads in sync()
  bool is_synchronised_ = false;  // all blocks have started
};

}  // namespace simt::runtime
