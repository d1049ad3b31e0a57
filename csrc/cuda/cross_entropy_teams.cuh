// Chooses the teams that process the rows of a cross-entropy, and how much of its row each team
// keeps in shared memory. The choice does not depend on the number of rows, so that the last bits
// of a row do not depend on its batch.
#pragma once

#include <algorithm>

#include "cross_entropy.cuh"

namespace ampfuse {

/// A warp takes rows of at most kWarpBytes that are not held in registers. With kPlain, kFewLanes
/// lanes take rows of at most kFewClasses floats. A warp combines its partial sums without waiting
/// for other warps, and a multiprocessor has 32 rows in flight, compared with 4 for blocks. An H100
/// moved rows of 4 KiB with warps at 63 % of the rate of a copy, and rows of 8 KiB with blocks at
/// 39 %.
inline constexpr int64_t kWarpBytes = 8192;
inline constexpr int64_t kFewClasses = 128;
inline constexpr int kFewLanes = 8;

/// The resources of a device.
struct DeviceRoom {
  int64_t multiprocessors;
  int64_t shared;              // bytes of shared memory per multiprocessor
  int64_t shared_per_block;    // the most bytes of it that one block may have
  int64_t l2;                  // bytes
  bool prefers_whole = false;  // the variant whole_rows
  bool holds_twice = false;    // the variant held_twice

  /// Returns the bytes of shared memory for each block if this many blocks share a multiprocessor.
  /// CUDA reserves 1 KiB of shared memory for each block.
  int64_t of_block(int blocks) const {
    return most_shared(std::min(shared_per_block, shared / blocks - 1024));
  }
};

/// The resources that each team has when teams of this kind fill a device.
template <typename scalar_t, typename Team, RowWork kWork>
struct TeamRoom {
  static constexpr int kBlocks = kRowBlocks<kWork, scalar_t, Team>;  // per multiprocessor
  static constexpr int64_t kPiece = Team::kSize * int64_t(sizeof(Pack<scalar_t>));

  const DeviceRoom& device;

  /// Returns the number of pieces of its row that a team can keep. A piece is one pack per thread.
  int64_t pieces() const { return device.of_block(kBlocks) / Team::kTeams / kPiece; }

  bool keeps(int64_t row_bytes) const { return row_bytes <= pieces() * kPiece; }

  /// Returns true if the L2 cache has room for the parts of rows that are not kept, for all rows in
  /// flight at a time. The limit is half of the cache. The cache also holds other data, and
  /// consists of two halves that each hold what their own multiprocessors read. When rows left 37
  /// MB to the 50 MB cache of an H100, nearly all of them were read from memory again.
  bool l2_holds_rest(int64_t row_bytes) const {
    const int64_t rest = std::max<int64_t>(row_bytes - pieces() * kPiece, 0);
    return device.multiprocessors * kBlocks * Team::kTeams * rest <= device.l2 / 2;
  }
};

/// Returns the number of blocks for these rows: at most as many as are resident at a time.
template <typename scalar_t, typename Team, RowWork kWork>
int resident_blocks(int64_t multiprocessors, int64_t rows) {
  const int64_t wanted = (rows + Team::kTeams - 1) / Team::kTeams;
  const int64_t most = multiprocessors * kRowBlocks<kWork, scalar_t, Team>;
  return static_cast<int>(std::clamp<int64_t>(wanted, 1, most));
}

/// The launch shape of the forward kernel.
struct RowLaunch {
  int blocks;
  int kept;    // packs that are kept of each row, a multiple of the team size
  int shared;  // bytes of dynamic shared memory
};

template <typename scalar_t, typename Team, RowWork kWork>
RowLaunch row_launch(const DeviceRoom& room, int64_t rows, int64_t classes, bool with_grad) {
  using Room = TeamRoom<scalar_t, Team, kWork>;
  const int64_t row_bytes = classes * int64_t(sizeof(scalar_t));
  const int64_t needed = (row_bytes + Room::kPiece - 1) / Room::kPiece;
  // A team that holds its row in registers may need room for all of it, too.
  const int64_t pieces = is_held(kWork) ? needed : std::min(needed, Room{room}.pieces());
  const int blocks = resident_blocks<scalar_t, Team, kWork>(room.multiprocessors, rows);
  if (!with_grad) return {blocks, 0, 0};
  return {blocks, static_cast<int>(pieces * Team::kSize),
          static_cast<int>(pieces * Room::kPiece * Team::kTeams)};
}

/// Calls launch.operator()<Team, kWork>() with the first of these teams that can hold a row.
/// Returns false if none can.
template <RowWork kWork, typename scalar_t, typename... Teams, typename Launch>
bool for_held_rows(int64_t classes, const Launch& launch) {
  const auto try_team = [&]<typename Team>() {
    if (classes > HeldRow<kWork, scalar_t, Team>::kMostClasses) return false;
    launch.template operator()<Team, kWork>();
    return true;
  };
  return (try_team.template operator()<Teams>() || ...);
}

/// Calls launch.operator()<Team, kWork>() for rows of a plain loss. Rows of up to 16,384 16-bit
/// logits are held in registers. A block of 1024 threads could hold more, but it would fill a
/// multiprocessor, which then reads no row while it writes another. Clusters of blocks could, too:
/// on an H200 a cluster of two was as fast as a block, and clusters of four and eight took two to
/// four times as long. Rows of floats go to a few lanes, to a warp, or to a block of 256 threads
/// that keeps all of its row in shared memory. Longer rows, and 16-bit rows that are not held, go
/// to a block of 512 threads, or of 1024 if the L2 cache could not hold what blocks of 512 do not
/// keep. Rows of doubles go to a warp or to a block of 256 threads.
template <typename scalar_t, typename Launch>
void for_plain_rows(const DeviceRoom& room, int64_t classes, const Launch& launch) {
  using Block = BlockTeam<kThreads>;
  using Wide = BlockTeam<2 * kThreads>;
  using Widest = BlockTeam<4 * kThreads>;
  constexpr RowWork kPlain = RowWork::kPlain;
  const int64_t row_bytes = classes * int64_t(sizeof(scalar_t));
  if constexpr (sizeof(scalar_t) == 2) {
    // The variant is compiled for one type and for these rows. With twice as many logits per
    // thread, a logit takes 13.1 to 13.6 instructions (sm_90) in threads that have neither the loss
    // nor the target, instead of 19.0 to 20.5.
    if constexpr (std::is_same_v<scalar_t, c10::BFloat16>) {
      using Few = HeldRow<RowWork::kHeld, scalar_t, LaneTeam<kFewLanes>>;
      if (room.holds_twice && classes > Few::kMostClasses &&
          for_held_rows<RowWork::kHeldTwice, scalar_t, LaneTeam<16>, BlockTeam<64>, BlockTeam<128>,
                        Block>(classes, launch)) {
        return;
      }
    }
    if (for_held_rows<RowWork::kHeld, scalar_t, LaneTeam<kFewLanes>, WarpTeam, BlockTeam<64>,
                      BlockTeam<128>, Block, Wide>(classes, launch)) {
      return;
    }
  } else {
    // double logits are for checking gradients, not for speed, so they need no other teams.
    constexpr bool kIsDouble = std::is_same_v<scalar_t, double>;
    if constexpr (!kIsDouble) {
      if (classes <= kFewClasses) return launch.template operator()<LaneTeam<kFewLanes>, kPlain>();
    }
    if (row_bytes <= kWarpBytes) return launch.template operator()<WarpTeam, kPlain>();
    if (kIsDouble || TeamRoom<scalar_t, Block, kPlain>{room}.keeps(row_bytes)) {
      return launch.template operator()<Block, kPlain>();
    }
  }
  if constexpr (!std::is_same_v<scalar_t, double>) {
    const TeamRoom<scalar_t, Wide, kPlain> wide{room};
    // A block of 1024 threads keeps rows of up to 57,000 floats whole, but fills a multiprocessor,
    // which then reads no row while it writes another.
    const bool is_whole = room.prefers_whole && sizeof(scalar_t) == 4 && !wide.keeps(row_bytes) &&
                          TeamRoom<scalar_t, Widest, kPlain>{room}.keeps(row_bytes);
    return wide.l2_holds_rest(row_bytes) && !is_whole
               ? launch.template operator()<Wide, kPlain>()
               : launch.template operator()<Widest, kPlain>();
  }
}

/// Calls launch.operator()<Team, kWork>(). kGeneral needs too many registers for 1024 threads.
template <typename scalar_t, typename Launch>
void for_forward_rows(const DeviceRoom& room, int64_t classes, bool plain, const Launch& launch) {
  using Block = BlockTeam<kThreads>;
  constexpr RowWork kGeneral = RowWork::kGeneral;
  if (plain) return for_plain_rows<scalar_t>(room, classes, launch);
  const int64_t row_bytes = classes * int64_t(sizeof(scalar_t));
  if (row_bytes <= kWarpBytes) return launch.template operator()<WarpTeam, kGeneral>();
  if constexpr (!std::is_same_v<scalar_t, double>) {
    if (!TeamRoom<scalar_t, Block, kGeneral>{room}.keeps(row_bytes)) {
      return launch.template operator()<BlockTeam<2 * kThreads>, kGeneral>();
    }
  }
  return launch.template operator()<Block, kGeneral>();
}

/// Calls launch.operator()<Team, kWork>() for rows that are positions of images.
template <typename Launch>
void for_positions(bool plain, const Launch& launch) {
  if (plain) return launch.template operator()<PositionTeam, RowWork::kPlain>();
  return launch.template operator()<PositionTeam, RowWork::kGeneral>();
}

/// Calls launch.operator()<Team, kWork>() for kernels that keep no logits.
template <typename Launch>
void for_rows_not_kept(int64_t row_bytes, bool plain, const Launch& launch) {
  const bool is_short = row_bytes <= kWarpBytes;
  if (is_short && plain) return launch.template operator()<WarpTeam, RowWork::kPlain>();
  if (is_short) return launch.template operator()<WarpTeam, RowWork::kGeneral>();
  if (plain) return launch.template operator()<BlockTeam<kThreads>, RowWork::kPlain>();
  return launch.template operator()<BlockTeam<kThreads>, RowWork::kGeneral>();
}

}  // namespace ampfuse
