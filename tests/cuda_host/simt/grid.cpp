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
  require(launch.dynamic_shared_bytes <= kSharedLimit,
          std::to_string(launch.dynamic_shared_bytes) + " bytes of dynamic shared memory");
}

// A ThreadSanitizer fiber keeps the order that its earlier threads established with other fibers,
// and is ordered with itself, so races between two blocks on the same fibers would be missed.
// Consecutive blocks therefore run on different fibers. Creating a few hundred fibers takes a
// fraction of a second, and 0.8 MB for each (gcc 12).
void grow_pool(std::size_t threads, BlockNumber blocks) {
  constexpr std::size_t kTsanFibers = 512;
  const std::size_t generations = kTsan ? std::max<std::size_t>(2, kTsanFibers / threads) : 1;
  const std::size_t wanted = threads * std::min<BlockNumber>(blocks, generations);
  while (pool.size() < wanted) pool.emplace_back(Block::fiber_main);
}

std::vector<BlockNumber> block_order(BlockNumber count, Schedule::Order order, Random& random) {
  std::vector<BlockNumber> blocks(count);
  std::iota(blocks.begin(), blocks.end(), 0);
  if (order == Schedule::Order::reverse) std::reverse(blocks.begin(), blocks.end());
  if (order == Schedule::Order::random)
    for (BlockNumber i = count; i > 1; --i) std::swap(blocks[i - 1], blocks[random.below(i)]);
  return blocks;
}

// Orders the host and all fibers with each other, at the beginning and the end of a launch.
void synchronise_with(Fiber& host) {
  std::vector<Fiber*> all = {&host};
  for (Fiber& fiber : pool) all.push_back(&fiber);
  Fiber::synchronise(all);
}

}  // namespace

void run(const Kernel& kernel, dim3 grid, dim3 block, std::size_t dynamic_shared_bytes,
         const Schedule& schedule) {
  const Launch launch = {kernel, grid, block, dynamic_shared_bytes, schedule};
  check(launch);
  const std::size_t threads = block.count();
  grow_pool(threads, grid.count());
  Fiber host;
  synchronise_with(host);
  Random random{schedule.seed};
  std::size_t first = 0;
  try {
    for (const BlockNumber number : block_order(grid.count(), schedule.order, random)) {
      const auto x = static_cast<unsigned>(number % grid.x);
      const auto y = static_cast<unsigned>(number / grid.x % grid.y);
      const auto z = static_cast<unsigned>(number / grid.x / grid.y);
      Block(launch, {x, y, z}, pool, first, random).run(host);
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
