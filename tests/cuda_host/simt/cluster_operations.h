// Operations of clusters, which csrc/cuda/cluster_operations.cuh defines for GPUs.
//
// Numbers arrive when they are sent. What a thread does before it sends to an inbox happens before
// what follows the end of the phase in other threads. These mistakes are reported:
// - a thread exits, or waits elsewhere, while others wait for it in sync_cluster;
// - a block sends before sync_cluster, to a block that has ended, or without other blocks;
// - bytes of a phase never arrive, are announced twice, or are more than were announced.
#pragma once

#include <bit>
#include <cstdint>

#include "simt/runtime.h"

namespace ampfuse {

inline int cluster_blocks() {
  return static_cast<int>(simt::runtime::cluster_dim);
}
inline int cluster_rank() {
  return static_cast<int>(simt::runtime::block_index.x % simt::runtime::cluster_dim);
}
inline int cluster_number() {
  return static_cast<int>(simt::runtime::block_index.x / simt::runtime::cluster_dim);
}
inline int cluster_count() {
  return static_cast<int>(simt::runtime::grid_dim.x / simt::runtime::cluster_dim);
}

inline void sync_cluster(simt::runtime::Site where = simt::runtime::Site::current()) {
  simt::runtime::sync_cluster(where);
}

using Inbox = std::uint64_t;

inline void open_inbox(Inbox* inbox) {
  *inbox = std::bit_cast<Inbox>(simt::runtime::InboxState());
}

inline void expect_bytes(Inbox* inbox, int bytes,
                         simt::runtime::Site where = simt::runtime::Site::current()) {
  simt::runtime::expect_bytes(inbox, bytes, where);
}

inline void send(int rank, double* to, double value, Inbox* inbox,
                 simt::runtime::Site where = simt::runtime::Site::current()) {
  *static_cast<double*>(simt::runtime::in_block(rank, to, where)) = value;
  simt::runtime::receive_bytes(rank, simt::runtime::in_block(rank, inbox, where), sizeof value,
                               where);
}

inline void wait_for_bytes(Inbox* inbox, bool is_odd,
                           simt::runtime::Site where = simt::runtime::Site::current()) {
  simt::runtime::wait_for_bytes(inbox, is_odd, where);
}

}  // namespace ampfuse
