// A launch checks CUDA's limits, finds fibers, and runs the blocks in the order of the schedule.

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "simt/cluster.h"
#include "simt/sanitizers.h"

namespace simt::runtime {
namespace {

using BlockNumber = unsigned long long;

// The fibers, which all blocks and launches reuse.
std::deque<Fiber> pool;

void check(const Launch& launch) {
  const auto require = [](bool condition, const std::string& what) {
    if (!condition) throw Error("simt: launch with " + what);
  };
  const auto [grid, block] = std::pair(launch.grid, launch.block);
  require(current == nullptr, "a kernel running");
  require(block.count() > 0 && grid.count() > 0, "an empty block or grid");
  require(block.x <= kMaxThreads && block.y <= kMaxThreads && block.count() <= kMaxThreads,
          std::to_string(block.count()) + " threads per block; the limit is 1024");
  require(block.z <= 64, "blocks " + std::to_string(block.z) + " deep; the limit is 64");
  require(grid.x <= 0x7fffffff && grid.y <= 0xffff && grid.z <= 0xffff,
          "a grid beyond 2^31-1, 65535, 65535");
  require(launch.cluster >= 1 && launch.cluster <= 8,
          "clusters of " + std::to_string(launch.cluster) + " blocks; CUDA promises 8");
  require(grid.x % launch.cluster == 0, "a grid that is not a multiple of the cluster");
  require(launch.dynamic_shared_bytes <= kSharedLimit,
          std::to_string(launch.dynamic_shared_bytes) + " bytes of dynamic shared memory");
}

// A ThreadSanitizer fiber keeps the order that its earlier threads established with other fibers,
// and is ordered with itself, so races between two clusters on the same fibers would be missed.
// Consecutive clusters therefore run on different fibers. Creating a few hundred fibers takes a
// fraction of a second, and 0.8 MB for each (gcc 12).
void grow_pool(std::size_t threads, BlockNumber clusters) {
  constexpr std::size_t kTsanFibers = 512;
  const std::size_t generations = kTsan ? std::max<std::size_t>(2, kTsanFibers / threads) : 1;
  const std::size_t wanted = threads * std::min<BlockNumber>(clusters, generations);
  while (pool.size() < wanted) pool.emplace_back(Block::fiber_main);
}

std::vector<BlockNumber> cluster_order(BlockNumber count, Schedule::Order order, Random& random) {
  std::vector<BlockNumber> clusters(count);
  std::iota(clusters.begin(), clusters.end(), 0);
  if (order == Schedule::Order::reverse) std::reverse(clusters.begin(), clusters.end());
  if (order == Schedule::Order::random)
    for (BlockNumber i = count; i > 1; --i) std::swap(clusters[i - 1], clusters[random.below(i)]);
  return clusters;
}

// Orders the host and all fibers with each other, at the beginning and the end of a launch.
void synchronise_with(Fiber& host) {
  std::vector<Fiber*> all = {&host};
  for (Fiber& fiber : pool) all.push_back(&fiber);
  Fiber::synchronise(all);
}

}  // namespace

void run(const Launch& launch) {
  check(launch);
  const dim3 grid = launch.grid;
  const std::size_t threads = launch.cluster * launch.block.count();
  const BlockNumber clusters = grid.count() / launch.cluster;
  grow_pool(threads, clusters);
  Fiber host;
  synchronise_with(host);
  Random random{launch.schedule.seed};
  std::size_t first = 0;
  try {
    for (const BlockNumber number : cluster_order(clusters, launch.schedule.order, random)) {
      const BlockNumber block = number * launch.cluster;  // the first of the cluster
      const auto x = static_cast<unsigned>(block % grid.x);
      const auto y = static_cast<unsigned>(block / grid.x % grid.y);
      const auto z = static_cast<unsigned>(block / grid.x / grid.y);
      Cluster(launch, {x, y, z}, pool, first, random).run(host);
      first = (first + threads) % pool.size();
    }
  } catch (...) {
    synchronise_with(host);
    pool.clear();  // some stacks hold frames of a kernel that will never end
    throw;
  }
  synchronise_with(host);
}

}  // namespace simt::runtime
