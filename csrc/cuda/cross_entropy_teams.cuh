// Which teams take the rows of a cross-entropy, and how much of its row each keeps. Nothing here
// asks how many rows there are: the last bits of a row shall not depend on its batch.
#pragma once

#include <algorithm>

#include "cross_entropy.cuh"

namespace ampfuse {

/// Rows up to this many bytes are a warp's, up to this many classes those of a few lanes. A warp
/// joins what it found without waiting for others, and 32 rows are on a multiprocessor's way where
/// blocks have 4: an H100 moves rows of 4 KiB at 63 % of a copy's rate by warps, those of 8 by
/// blocks at 39.
inline constexpr int64_t kWarpBytes = 8192;
inline constexpr int64_t kFewClasses = 128;
inline constexpr int kFewLanes = 8;

/// What a device has room for.
struct DeviceRoom {
  int64_t multiprocessors;
  int64_t shared;            // bytes, of a multiprocessor
  int64_t shared_per_block;  // that one block may have of them
  int64_t l2;

  /// Bytes of shared memory for each of so many blocks on a multiprocessor. The system takes 1 KiB
  /// of each.
  int64_t of_block(int blocks) const {
    return most_shared(std::min(shared_per_block, shared / blocks - 1024));
  }
};

/// How teams of a kind share out a device.
template <typename scalar_t, typename Team, RowWork kWork>
struct TeamRoom {
  static constexpr int kBlocks = kRowBlocks<kWork, scalar_t, Team>;  // on a multiprocessor
  static constexpr int64_t kPiece = Team::kSize * int64_t(sizeof(Pack<scalar_t>));

  const DeviceRoom& device;

  /// Pieces, a pack of each thread, that a team may keep of its row.
  int64_t pieces() const { return device.of_block(kBlocks) / Team::kTeams / kPiece; }

  bool keeps(int64_t row_bytes) const { return row_bytes <= pieces() * kPiece; }

  /// Whether the L2 cache has room for what is not kept of as many rows of this size as are on
  /// their way at a time. It holds other things, too, and is in halves that each have what their
  /// multiprocessors read: of 37 MB in an H100's 50 nearly all had to be read from memory again.
  bool l2_holds_rest(int64_t row_bytes) const {
    const int64_t rest = std::max<int64_t>(row_bytes - pieces() * kPiece, 0);
    return device.multiprocessors * kBlocks * Team::kTeams * rest <= device.l2 / 2;
  }
};

/// How forward's kernel is launched.
struct RowLaunch {
  int blocks;
  int kept;    // packs of each row, a multiple of a team's size
  int shared;  // bytes
};

template <typename scalar_t, typename Team, RowWork kWork>
RowLaunch row_launch(const DeviceRoom& room, int64_t rows, int64_t classes, bool with_grad) {
  using Room = TeamRoom<scalar_t, Team, kWork>;
  const int64_t row_bytes = classes * int64_t(sizeof(scalar_t));
  const int64_t needed = (row_bytes + Room::kPiece - 1) / Room::kPiece;
  const int64_t pieces = std::min(needed, Room{room}.pieces());
  const int64_t wanted = (rows + Team::kTeams - 1) / Team::kTeams;
  const int64_t blocks = std::clamp<int64_t>(wanted, 1, room.multiprocessors * Room::kBlocks);
  if (!with_grad) return {static_cast<int>(blocks), 0, 0};
  return {static_cast<int>(blocks), static_cast<int>(pieces * Team::kSize),
          static_cast<int>(pieces * Room::kPiece * Team::kTeams)};
}

/// Calls launch.operator()<Team, kWork>(): a few lanes for each row, a warp, or a block. A block is
/// of 256 threads if it keeps all of its row; else of 512, or of 1024 where the L2 cache would not
/// hold what those do not keep. Work that is not plain has no registers for 1024 threads.
template <typename scalar_t, typename Launch>
void for_forward_rows(const DeviceRoom& room, int64_t classes, bool plain, const Launch& launch) {
  using Block = BlockTeam<kThreads>;
  using Wide = BlockTeam<2 * kThreads>;
  using Widest = BlockTeam<4 * kThreads>;
  constexpr RowWork kPlain = RowWork::kPlain;
  constexpr RowWork kAny = RowWork::kAny;
  // Doubles are for checking gradients.
  constexpr bool kIsDouble = std::is_same_v<scalar_t, double>;
  const int64_t row_bytes = classes * int64_t(sizeof(scalar_t));
  if (row_bytes <= kWarpBytes) {
    if (!plain) return launch.template operator()<WarpTeam, kAny>();
    if constexpr (!kIsDouble) {
      if (classes <= kFewClasses) return launch.template operator()<LaneTeam<kFewLanes>, kPlain>();
    }
    return launch.template operator()<WarpTeam, kPlain>();
  }
  if constexpr (!kIsDouble) {
    if (!plain && !TeamRoom<scalar_t, Block, kAny>{room}.keeps(row_bytes)) {
      return launch.template operator()<Wide, kAny>();
    }
    if (plain && !TeamRoom<scalar_t, Block, kPlain>{room}.keeps(row_bytes)) {
      return TeamRoom<scalar_t, Wide, kPlain>{room}.l2_holds_rest(row_bytes)
                 ? launch.template operator()<Wide, kPlain>()
                 : launch.template operator()<Widest, kPlain>();
    }
  }
  if (plain) return launch.template operator()<Block, kPlain>();
  return launch.template operator()<Block, kAny>();
}

/// The same for places.
template <typename Launch>
void for_places(bool plain, const Launch& launch) {
  if (plain) return launch.template operator()<PlaceTeam, RowWork::kPlain>();
  return launch.template operator()<PlaceTeam, RowWork::kAny>();
}

/// The same where rows are gone through once.
template <typename Launch>
void for_backward_rows(int64_t row_bytes, bool plain, const Launch& launch) {
  const bool is_short = row_bytes <= kWarpBytes;
  if (is_short && plain) return launch.template operator()<WarpTeam, RowWork::kPlain>();
  if (is_short) return launch.template operator()<WarpTeam, RowWork::kAny>();
  if (plain) return launch.template operator()<BlockTeam<kThreads>, RowWork::kPlain>();
  return launch.template operator()<BlockTeam<kThreads>, RowWork::kAny>();
}

}  // namespace ampfuse
