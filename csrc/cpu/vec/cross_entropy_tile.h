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
  math::LossTerms<double> terms;
  ClassShares shares;  // probabilities are the first row's
  TileLayout probabilities;
  const void* targets;  // the first row's; null where there are probabilities
  c10::ScalarType target_dtype;
  int64_t ignore_index;

  AMPFUSE_HOST_DEVICE bool has_targets() const { return targets != nullptr; }
  // How many rows are computed: those there are, in vectors of as many floats as any has.
  AMPFUSE_HOST_DEVICE int64_t lanes() const { return (rows + 15) / 16 * 16; }
};

/// A number for each row, up to lanes().
using TileNumbers = double[kTileRows];

/// Rows' own targets: classes, their logits, and what they weigh (B). Vectors of floats hold
/// classes exactly up to 2²⁴; images of more, which have at least a sixteenth as many places, fit
/// no memory.
struct TileTargets {
  TileNumbers index, logit, share;
};

/// In place of a class: of rows that are ignored or not there, and of rows whose target is a
/// distribution, or elsewhere.
inline constexpr double kIgnored = -1;
inline constexpr double kNoClass = -2;

/// math::RowPart of each row.
struct TilePart {
  TileNumbers largest, reference, sum, shares, spread, entropy;
};

struct TileStatistics {
  TileNumbers largest, sum, others, shares;
};

struct TileLoss {
  TileNumbers loss, lse, entropy;
  double total;  // of the losses
  TileStatistics statistics;
};

/// Of memory for a tile, which calls for it share: arrays [classes][kTileRows].
inline int64_t tile_bytes(const Tile& tile) {
  const bool is_fp32 = tile.dtype == c10::ScalarType::Float;
  const int64_t arrays =
      1 + is_fp32 + (tile.terms.softcap != 0) + !tile.has_targets() + tile.layout.by_row;
  const int64_t number = tile.dtype == c10::ScalarType::Double ? 8 : 4;
  return arrays * tile.classes * kTileRows * number;
}

/// Reads logits and targets, tells what they are, and leaves exponentials as row_part does.
/// Entropies and the classes of the first largest logits only where `argmax` is not null.
AMPFUSE_PER_CAPABILITY(void tile_part(const Tile& tile, void* memory, TilePart& part,
                                      TileTargets& targets, int64_t* argmax))

/// The same exponentials for rows whose largest z are known.
AMPFUSE_PER_CAPABILITY(void tile_exponentials(const Tile& tile, void* memory,
                                              const TileNumbers& largest, TileNumbers& reference,
                                              TileTargets& targets))

/// math::row_loss of each row, zeros for rows that are ignored; lse and entropy, which these have
/// too, only with_metrics.
AMPFUSE_PER_CAPABILITY(void tile_loss(const Tile& tile, const TilePart& part,
                                      const TileTargets& targets, bool with_metrics,
                                      TileLoss& loss))

/// Writes the gradient, of row_gradient's dtypes, which may be where the logits are, times `scale`;
/// zeros for rows that are ignored.
AMPFUSE_PER_CAPABILITY(void tile_gradient(const Tile& tile, void* memory,
                                          const TileStatistics& statistics,
                                          const TileNumbers& reference, const TileTargets& targets,
                                          const TileNumbers& scale, void* out,
                                          c10::ScalarType out_dtype, TileLayout layout))

}  // namespace ampfuse
