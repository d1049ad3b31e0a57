// Teams of the threads of several blocks.
#pragma once

#include "cluster_operations.cuh"
#include "team.cuh"

namespace ampfuse {

// All threads of a cluster. Each block has a share of the work and processes it as a BlockTeam.
template <int kBlockSize>
class ClusterTeam : public BlockTeam<kBlockSize> {
  using Block = BlockTeam<kBlockSize>;

 public:
  static constexpr int kMostBlocks = 8;  // CUDA promises clusters of this size
  static constexpr int kNumbers = kMostBlocks * Block::kWarps;
  static constexpr int kScratch = Block::kScratch + 2 * (kNumbers + 1);

  // Waits for the other blocks, since a block has no shared memory before it starts.
  __device__ explicit ClusterTeam(double* scratch)
      : Block(scratch), numbers_(scratch + Block::kScratch) {
    if (this->index() == 0) {
      open_inbox(inbox(0));
      open_inbox(inbox(1));
    }
    sync_cluster();
  }

  __device__ bool is_first() const { return this->index() == 0 && cluster_rank() == 0; }
  __device__ int64_t number() const { return cluster_number(); }
  __device__ static int64_t count() { return cluster_count(); }

  // Returns this block's part of `count` elements. Parts start at multiples of kPack.
  template <int kPack>
  __device__ Share share_of(int count) const {
    const int blocks = cluster_blocks();
    const int most = (count + blocks * kPack - 1) / kPack / blocks * kPack;
    const int first = min(cluster_rank() * most, count);
    return {first, min(most, count - first)};
  }

  // Returns the number of warps of the cluster.
  __device__ static int warps() { return cluster_blocks() * Block::kWarps; }

  // Returns the numbers `mine` of all warps of the cluster, in the same order for all threads. All
  // lanes of a warp give the same number. A warp may read the array until its next call.
  //
  // No fence orders other accesses to memory between blocks. If a block overwrites after this call
  // what another one loads before it, `mine` must depend on what was loaded.
  //
  // No block waits until the others have read the array. A second array makes this safe: a warp
  // writes to the first one again only after it has received numbers of the call between from all
  // warps, and a warp sends those after it has read the first array.
  __device__ const double* of_all_warps(double mine) const {
    const int array = calls_ & 1;
    const bool is_odd = calls_ & 2;
    ++calls_;
    double* const numbers = numbers_ + array * kNumbers;
    double* const own = numbers + cluster_rank() * Block::kWarps + this->index() / kWarp;
    if (this->index() == 0) expect_bytes(inbox(array), warps() * int(sizeof(double)));
    __syncwarp();  // all lanes have read the other array
    const int lane = this->index() % kWarp;
    if (lane < cluster_blocks()) send(lane, own, mine, inbox(array));
    wait_for_bytes(inbox(array), is_odd);
    return numbers;
  }

 private:
  // The inbox of one of the two arrays.
  __device__ Inbox* inbox(int array) const {
    return reinterpret_cast<Inbox*>(numbers_ + 2 * kNumbers + array);
  }

  double* numbers_;
  mutable unsigned calls_ = 0;
};

}  // namespace ampfuse
