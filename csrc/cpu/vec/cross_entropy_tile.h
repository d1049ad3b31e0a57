#pragma once

#include "cross_entropy.h"

namespace ampfuse {

/// So many rows at a time, a row in each lane of a few vector registers: where rows have few
/// classes, or classes that are far apart in memory.
inline constexpr int64_t kTileRows = 32;

/// Where numbers of rows are: row by row or class by class, so many elements from one to the next,
/// each in one piece.
struct TileLayout {
  bool by_row;
  int64_t stride;
};

struct Tile {
  const void* logits;
  c10::ScalarType dtype;
  TileLayout layout;
  int64_t rows;  // at most kTileRows
  int64_t classes;
  double softcap;      // 0: none
  ClassShares shares;  // probabilities are the first row's
  TileLayout probabilities;
  int64_t targets[kTileRows];  // classes; -1 of rows that have none

  AMPFUSE_HOST_DEVICE bool has_targets() const { return shares.probabilities == nullptr; }
};

/// A number for each row.
using TileNumbers = double[kTileRows];

/// math::RowPart of each row, and z of its target.
struct TilePart {
  TileNumbers largest, reference, sum, shares, spread, entropy, target_z;
};

struct TileStatistics {
  TileNumbers largest, sum, others, shares;
};

struct TileLoss {
  TileNumbers loss, lse, entropy;
  TileStatistics statistics;
};

/// Of memory for a tile, which calls for it share: arrays [classes][kTileRows].
inline int64_t tile_bytes(const Tile& tile) {
  const bool is_fp32 = tile.dtype == c10::ScalarType::Float;
  const int64_t arrays =
      1 + is_fp32 + (tile.softcap != 0) + !tile.has_targets() + tile.layout.by_row;
  const int64_t number = tile.dtype == c10::ScalarType::Double ? 8 : 4;
  return arrays * tile.classes * kTileRows * number;
}

/// Reads logits, tells what they are, and leaves exponentials as row_part does. Entropies and
/// the classes of the first largest logits only where `argmax` is not null.
AMPFUSE_PER_CAPABILITY(void tile_part(const Tile& tile, void* memory, TilePart& part,
                                      int64_t* argmax))

/// The same exponentials for rows whose largest z are known.
AMPFUSE_PER_CAPABILITY(void tile_exponentials(const Tile& tile, void* memory,
                                              const TileNumbers& largest, TileNumbers& reference))

/// math::row_loss of each row, whose target has this share; lse and entropy only with_metrics.
AMPFUSE_PER_CAPABILITY(void tile_loss(const Tile& tile, const TilePart& part,
                                      const TileNumbers& target_share, double z_loss,
                                      bool with_metrics, TileLoss& loss))

/// Writes the gradient, which may be where the logits are, times `scale`; zeros for rows that have
/// no target where others have.
AMPFUSE_PER_CAPABILITY(void tile_gradient(const Tile& tile, void* memory,
                                          const TileStatistics& statistics,
                                          const TileNumbers& reference,
                                          const TileNumbers& target_share, double z_loss,
                                          const TileNumbers& scale, void* out, TileLayout layout))

}  // namespace ampfuse
