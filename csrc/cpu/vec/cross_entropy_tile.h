#pragma once

#include "cross_entropy.h"

namespace ampfuse {

/// The number of rows in a tile. Each row occupies one lane of a vector register, so a tile fills a
/// few registers. Tiles are for rows with few classes, or with classes that are far apart in
/// memory.
inline constexpr int64_t kTileRows = 32;

/// Memory layout of a tile: row by row, or class by class. Each row (or class) is contiguous, and
/// starts `stride` elements after the previous one.
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
  math::LossTerms<double> terms;
  ClassMasses masses;  // points to the first row's probabilities
  TileLayout probability_layout;
  const void* targets;  // from the first row on; null if targets are probabilities
  c10::ScalarType target_dtype;
  int64_t ignore_index;

  AMPFUSE_HOST_DEVICE bool has_targets() const { return targets != nullptr; }
  // Number of rows that are computed: `rows` rounded up to 16, the floats in the widest vector.
  AMPFUSE_HOST_DEVICE int64_t lanes() const { return (rows + 15) / 16 * 16; }
};

/// One number per row, for rows below lanes().
using TileNumbers = double[kTileRows];

/// The target of each row: its class, its logit, and its mass B (math/cross_entropy.h). Floats hold
/// class indices exactly up to 2²⁴. Images with more classes do not fit in memory: they are read in
/// tiles only if they have at least a sixteenth as many positions as classes.
struct TileTargets {
  TileNumbers index, logit, mass;
};

/// Values of `index` without a class. kIgnored: the row is ignored or does not exist. kNoClass: the
/// target is a distribution, or is on another shard (math::kElsewhere).
inline constexpr double kIgnored = -1;
inline constexpr double kNoClass = -2;
static_assert(kNoClass == math::kElsewhere);

/// The math::RowPartial of each row.
struct TilePartial {
  TileNumbers largest, reference, sum, masses, spread, entropy;
};

struct TileStatistics {
  TileNumbers largest, sum, others, masses;
};

struct TileLoss {
  TileNumbers loss, lse, entropy;
  double total;  // sum of the losses
  TileStatistics statistics;
};

/// Returns the size of the memory that all calls for a tile share: arrays [classes][kTileRows].
inline int64_t tile_bytes(const Tile& tile) {
  const bool is_fp32 = tile.dtype == c10::ScalarType::Float;
  const int64_t arrays =
      1 + is_fp32 + (tile.terms.softcap != 0) + !tile.has_targets() + tile.layout.by_row;
  const int64_t number = tile.dtype == c10::ScalarType::Double ? 8 : 4;
  return arrays * tile.classes * kTileRows * number;
}

/// Computes the partial results and targets of the rows, and leaves exponentials in `memory` as
/// row_partial does. Entropies and argmax are computed only if `argmax` is not null.
AMPFUSE_PER_CAPABILITY(void tile_partial(const Tile& tile, void* memory, TilePartial& partial,
                                         TileTargets& targets, int64_t* argmax))

/// Computes exponentials as tile_partial does for rows whose largest z are known. Also sets
/// `reference` and `targets`.
AMPFUSE_PER_CAPABILITY(void tile_exponentials(const Tile& tile, void* memory,
                                              const TileNumbers& largest, TileNumbers& reference,
                                              TileTargets& targets))

/// Computes math::row_loss of each row. Loss and statistics of ignored rows are zeros. lse and
/// entropy are computed only if `with_metrics`, for ignored rows, too.
AMPFUSE_PER_CAPABILITY(void tile_loss(const Tile& tile, const TilePartial& partial,
                                      const TileTargets& targets, bool with_metrics,
                                      TileLoss& loss))

/// Writes the gradient times `scale`, in a dtype that row_gradient supports, and zeros for ignored
/// rows. It may overwrite the logits.
AMPFUSE_PER_CAPABILITY(void tile_gradient(const Tile& tile, void* memory,
                                          const TileStatistics& statistics,
                                          const TileNumbers& reference, const TileTargets& targets,
                                          const TileNumbers& scale, void* out,
                                          c10::ScalarType out_dtype, TileLayout layout))

}  // namespace ampfuse
