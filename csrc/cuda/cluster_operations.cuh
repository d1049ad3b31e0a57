// Operations of clusters of blocks, which GPUs have from compute capability 9.0 on. Blocks of a
// cluster run at the same time and can write to each other's shared memory. CUDA has functions for
// only some of these operations, so all are written in PTX. Tests that run kernels on the CPU
// define them differently.
#pragma once

#include <cstdint>

#if defined(__CUDACC__)

// Kernels with clusters are also compiled for older GPUs, but are not launched there.
#if !defined(__CUDA_ARCH__) || __CUDA_ARCH__ >= 900
#define AMPFUSE_IF_CLUSTERS(...) __VA_ARGS__
#else
#define AMPFUSE_IF_CLUSTERS(...) __trap()
#endif

namespace ampfuse {

// Returns the number of blocks of a cluster.
__device__ __forceinline__ int cluster_blocks() {
  int blocks = 1;
  AMPFUSE_IF_CLUSTERS(asm("mov.u32 %0, %%cluster_nctarank;" : "=r"(blocks)));
  return blocks;
}

// Returns the number of this block in its cluster.
__device__ __forceinline__ int cluster_rank() {
  int rank = 0;
  AMPFUSE_IF_CLUSTERS(asm("mov.u32 %0, %%cluster_ctarank;" : "=r"(rank)));
  return rank;
}

// Returns the number of this cluster in the grid.
__device__ __forceinline__ int cluster_number() {
  int number = 0;
  AMPFUSE_IF_CLUSTERS(asm("mov.u32 %0, %%clusterid.x;" : "=r"(number)));
  return number;
}

// Returns the number of clusters in the grid.
__device__ __forceinline__ int cluster_count() {
  int count = 1;
  AMPFUSE_IF_CLUSTERS(asm("mov.u32 %0, %%nclusterid.x;" : "=r"(count)));
  return count;
}

// Waits for all threads of the cluster.
__device__ __forceinline__ void sync_cluster() {
  AMPFUSE_IF_CLUSTERS(asm volatile("barrier.cluster.arrive;" :: : "memory"));
  AMPFUSE_IF_CLUSTERS(asm volatile("barrier.cluster.wait;" :: : "memory"));
}

// The address of shared memory of this block as PTX takes it.
__device__ __forceinline__ uint32_t shared_address(const void* shared) {
  return static_cast<uint32_t>(__cvta_generic_to_shared(shared));
}

// An Inbox, in a block's shared memory, counts the bytes that the blocks of its cluster send to it.
// A phase ends when all bytes have arrived that were announced for it.
using Inbox = uint64_t;

// One thread of the block calls this, before sync_cluster().
__device__ __forceinline__ void open_inbox(Inbox* inbox) {
  AMPFUSE_IF_CLUSTERS(asm volatile(
      "mbarrier.init.shared::cta.b64 [%0], 1;" ::"r"(shared_address(inbox)) : "memory"));
  AMPFUSE_IF_CLUSTERS(asm volatile("fence.mbarrier_init.release.cluster;" :: : "memory"));
}

// Announces the bytes of a phase. One thread of the block calls this, once per phase.
__device__ __forceinline__ void expect_bytes(Inbox* inbox, int bytes) {
  AMPFUSE_IF_CLUSTERS(asm volatile(
      "mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(inbox)),
      "r"(bytes) : "memory"));
}

// Stores `value` in block `rank` of the cluster, at the place that `to` has in this one, and then
// adds its size to the bytes of that block's inbox. The cluster must have at least two blocks.
__device__ __forceinline__ void send(int rank, double* to, double value, Inbox* inbox) {
  AMPFUSE_IF_CLUSTERS(asm volatile(
      "{\n\t"
      ".reg .b32 to, inbox;\n\t"
      "mapa.shared::cluster.u32 to, %0, %3;\n\t"
      "mapa.shared::cluster.u32 inbox, %2, %3;\n\t"
      "st.async.shared::cluster.mbarrier::complete_tx::bytes.b64 [to], %1, [inbox];\n\t"
      "}" ::"r"(shared_address(to)),
      "l"(__double_as_longlong(value)), "r"(shared_address(inbox)), "r"(rank) : "memory"));
}

// Waits for the end of a phase; `is_odd` is whether its number, counted from 0, is odd.
__device__ __forceinline__ void wait_for_bytes(Inbox* inbox, bool is_odd) {
  AMPFUSE_IF_CLUSTERS(
      asm volatile("{\n\t"
                   ".reg .pred has_ended;\n"
                   "again:\n\t"
                   "mbarrier.try_wait.parity.shared::cta.b64 has_ended, [%0], %1;\n\t"
                   "@!has_ended bra again;\n\t"
                   "}" ::"r"(shared_address(inbox)),
                   "r"(int(is_odd)) : "memory"));
}

}  // namespace ampfuse

#undef AMPFUSE_IF_CLUSTERS

#endif
