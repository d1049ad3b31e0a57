#include "simt/cluster.h"

#include <algorithm>
#include <bit>
#include <numeric>
#include <utility>

namespace simt::runtime {
namespace {

std::uint64_t& bits_of(void* inbox) {
  return *static_cast<std::uint64_t*>(inbox);
}

InboxState state_of(void* inbox) {
  return std::bit_cast<InboxState>(bits_of(inbox));
}

}  // namespace

Cluster::Cluster(const Launch& launch, unsigned first_block, std::deque<Fiber>& pool,
                 std::size_t first_fiber, Random& random)
    : launch_(launch), random_(random) {
  for (unsigned rank = 0; rank < launch.cluster; ++rank) {
    blocks_.emplace_back(launch, *this, first_block + rank, pool, first_fiber + rank * launch.block,
                         random);
  }
}

void Cluster::run(Fiber& host) {
  std::vector<unsigned> order(blocks_.size());
  std::iota(order.begin(), order.end(), 0);
  if (launch_.schedule.order == Schedule::Order::reverse) std::ranges::reverse(order);
  for (bool has_run = true; has_run;) {
    has_run = false;
    if (launch_.schedule.order == Schedule::Order::random)
      std::swap(order[0], order[random_.below(order.size())]);
    for (const unsigned rank : order) {
      if (!blocks_[rank].can_run()) continue;
      blocks_[rank].run(host);
      has_run = true;
    }
  }
  for (Block& block : blocks_) block.require_end();
}

void Cluster::sync(const Site& where) {
  if (++waiting_ < blocks_.size() * launch_.block) {
    current->wait_in_cluster("sync_cluster", nullptr, where);
    return;
  }
  waiting_ = 0;
  is_synchronised_ = true;
  std::vector<Fiber*> met = {current->running().fiber};
  for (Block& block : blocks_) block.wake_in_cluster(nullptr, met);
  met.front()->order(met, met);
}

void* Cluster::in_block(int rank, const void* shared, const Site& where) {
  if (rank < 0 || static_cast<std::size_t>(rank) >= blocks_.size())
    fault("no block of the cluster has this rank", where);
  if (blocks_.size() < 2) fault("access to another block in a cluster of one block", where);
  if (!is_synchronised_) fault("access to a block that may not have started", where);
  Block& block = blocks_[rank];
  if (block.has_ended()) fault("access to a block that has ended", where);
  void* const found = current->shared().same_in(block.shared(), shared);
  if (!found) fault("access to memory that is not shared", where);
  return found;
}

void Cluster::announce(void* inbox, int bytes, const Site& where) {
  InboxState state = state_of(inbox);
  if (state.is_announced) fault("the bytes of a phase are announced twice", where);
  state.is_announced = true;
  state.missing += bytes;
  update(*current, inbox, state, where);
}

void Cluster::receive(int rank, void* inbox, int bytes, const Site& where) {
  InboxState state = state_of(inbox);
  state.missing -= bytes;
  update(blocks_[rank], inbox, state, where);
}

void Cluster::update(Block& block, void* inbox, InboxState state, const Site& where) {
  if (state.is_announced && state.missing < 0)
    fault("a phase gets more bytes than were announced", where);
  const bool ends = state.is_announced && state.missing == 0;
  if (ends) state = {.phase = static_cast<std::uint16_t>(state.phase + 1)};
  bits_of(inbox) = std::bit_cast<std::uint64_t>(state);
  release(inbox);
  std::vector<Fiber*> met;  // `release` and `acquire` put them in order
  if (ends) block.wake_in_cluster(inbox, met);
}

void Cluster::wait(void* inbox, bool is_odd, const Site& where) {
  const bool is_phase_running = (state_of(inbox).phase % 2 != 0) == is_odd;
  if (is_phase_running) current->wait_in_cluster("wait_for_bytes", inbox, where);
  acquire(inbox);
}

}  // namespace simt::runtime
