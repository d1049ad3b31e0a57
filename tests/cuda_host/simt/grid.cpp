// A launch checks CUDA's limits, finds fibers, and runs the blocks in the order of the schedule.

#include <algorithm>
#include <numeric>
#include <string>
#include <utility>
#include <vector>

#include "simt/block.h"
#include "simt/sanitizers.h"

namespace simt::runtime {
namespace {

// The fibers, which all blocks and launches reuse.
std::deque<Fiber> pool;

void check(const Launch& launch) {
  const auto require = [](bool condition, const std::string& what) {
    if (!condition) throw Error("simt: launch with " + what);
  };
  require(current == nullptr, "a kernel running");
  require(launch.block > 0 && launch.grid > 0, "an empty block or grid");
  require(launch.block <= kMaxThreads,
          std::to_string(launch.block) + " threads per block; the limit is 1024");
  require(launch.grid <= 0x7fffffff, "a grid beyond 2^31-1");
  require(launch.dynamic_shared_bytes <= kSharedLimit,
          std::to_string(launch.dynamic_shared_bytes) + " bytes of dynamic shared memory");
}

// A ThreadSanitizer fiber keeps the order that its earlier threads established with other fibers,
// and is ordered with itself, so races between two blocks on the same fibers would be missed.
// Consecutive blocks therefore run on different fibers. Creating a few hundred fibers takes a
// fraction of a second, and 0.8 MB for each (gcc 12).
void grow_pool(std::size_t threads, unsigned blocks) {
  constexpr std::size_t kTsanFibers = 512;
  const std::size_t generations = kTsan ? std::max<std::size_t>(2, kTsanFibers / threads) : 1;
  const std::size_t wanted = threads * std::min<std::size_t>(blocks, generations);
  while (pool.size() < wanted) pool.emplace_back(Block::fiber_main);
}

std::vector<unsigned> block_order(unsigned count, Schedule::Order order, Random& random) {
  std::vector<unsigned> blocks(count);
  std::iota(blocks.begin(), blocks.end(), 0);
  if (order == Schedule::Order::reverse) std::reverse(blocks.begin(), blocks.end());
  if (order == Schedule::Order::random)
    for (unsigned i = count; i > 1; --i) std::swap(blocks[i - 1], blocks[random.below(i)]);
  return blocks;
}

}  // namespace

void run(const Launch& launch) {
  check(launch);
  const std::size_t threads = launch.block;
  grow_pool(threads, launch.grid);
  Fiber host;
  const std::vector<Fiber*> hosts = {&host};
  std::vector<Fiber*> fibers;  // of this launch; the pool may have more
  while (fibers.size() < std::min(threads * launch.grid, pool.size()))
    fibers.push_back(&pool[fibers.size()]);
  host.order(hosts, fibers);
  Random random{launch.schedule.seed};
  std::size_t first = 0;
  try {
    for (const unsigned index : block_order(launch.grid, launch.schedule.order, random)) {
      Block(launch, index, pool, first, random).run(host);
      first = (first + threads) % pool.size();
    }
  } catch (...) {
    host.order(fibers, hosts);
    pool.clear();  // some stacks hold frames of a kernel that will never end
    throw;
  }
  host.order(fibers, hosts);
}

}  // namespace simt::runtime
