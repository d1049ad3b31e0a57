// A thread takes tiles of rows, whose sums of losses are added up in the order of tiles.
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include "cross_entropy_passes.h"

namespace ampfuse {

namespace {

// Calls visit(tile, memory for it) for each.
template <typename Visit>
void each_tile(const CpuRows& rows, const Visit& visit) {
  at::parallel_for(
      0, rows.tiles(), worth_a_thread(rows.classes() * kTileRows), [&](int64_t begin, int64_t end) {
        const auto memory = c10::GetCPUAllocator()->allocate(tile_bytes(rows.tile(begin)));
        for (int64_t tile = begin; tile < end; ++tile) visit(tile, memory.get());
      });
}

// Whether row i of a tile counts.
bool counts(const Tile& tile, int64_t i) {
  return !tile.has_targets() || tile.targets[i] >= 0;
}

void put_losses(const Tile& tile, const TileLoss& loss, int64_t number, int64_t first,
                const ForwardResults& results) {
  if (results.is_each) {
    for (int64_t i = 0; i < tile.rows; ++i) {
      results.each_loss.put(first + i, counts(tile, i) ? loss.loss[i] : 0);
    }
    return;
  }
  constexpr int64_t kSums = 8;  // so that no addition waits for the one before it
  double sums[kSums] = {};
  for (int64_t i = 0; i < kTileRows; ++i) {
    sums[i % kSums] += i < tile.rows && counts(tile, i) ? loss.loss[i] : 0;
  }
  for (int64_t step = 1; step < kSums; step *= 2) {
    for (int64_t i = 0; i < kSums; i += 2 * step) sums[i] += sums[i + step];
  }
  results.losses[number] = sums[0];
}

void put_statistics(const Tile& tile, const TileStatistics& known, math::RowStatistics* to) {
  for (int64_t i = 0; i < tile.rows; ++i) {
    to[i] = {};
    if (counts(tile, i)) to[i] = {known.largest[i], known.sum[i], known.others[i], known.shares[i]};
  }
}

TileStatistics statistics_of(const Tile& tile, const math::RowStatistics* rows) {
  TileStatistics known = {};
  for (int64_t i = 0; i < tile.rows; ++i) {
    known.largest[i] = rows[i].largest;
    known.sum[i] = rows[i].sum;
    known.others[i] = rows[i].others;
    known.shares[i] = rows[i].shares;
  }
  return known;
}

}  // namespace

void forward_by_tile(const CpuRows& rows, double scale, const ForwardResults& results) {
  const auto part_of = AMPFUSE_CHOOSE(tile_part);
  const auto loss_of = AMPFUSE_CHOOSE(tile_loss);
  const auto gradient = AMPFUSE_CHOOSE(tile_gradient);
  TileNumbers scales;
  std::fill_n(scales, kTileRows, scale);
  each_tile(rows, [&](int64_t number, void* memory) {
    const Tile tile = rows.tile(number);
    const int64_t first = rows.first_row(number);
    TilePart part;
    int64_t argmax[kTileRows];
    part_of(tile, memory, part, results.with_metrics ? argmax : nullptr);
    TileNumbers target_shares;
    rows.target_shares(tile, target_shares);
    TileLoss loss;
    loss_of(tile, part, target_shares, rows.z_loss(), results.with_metrics, loss);
    put_losses(tile, loss, number, first, results);
    if (results.statistics != nullptr) {
      put_statistics(tile, loss.statistics, results.statistics + first);
    }
    if (results.with_metrics) {
      std::copy_n(argmax, tile.rows, results.argmax + first);
      for (int64_t i = 0; i < tile.rows; ++i) {
        results.lse.put(first + i, loss.lse[i]);
        results.entropy.put(first + i, loss.entropy[i]);
      }
    }
    if (results.grad.is_wanted()) {
      gradient(tile, memory, loss.statistics, part.reference, target_shares, rows.z_loss(), scales,
               results.grad.at(first, 0), results.grad.layout());
    }
  });
}

void backward_by_tile(const CpuRows& rows, const BackwardInputs& inputs, const RowWriter& grad) {
  const auto exponentials = AMPFUSE_CHOOSE(tile_exponentials);
  const auto gradient = AMPFUSE_CHOOSE(tile_gradient);
  each_tile(rows, [&](int64_t number, void* memory) {
    const Tile tile = rows.tile(number);
    const int64_t first = rows.first_row(number);
    const TileStatistics known = statistics_of(tile, inputs.statistics + first);
    TileNumbers reference;
    exponentials(tile, memory, known.largest, reference);
    TileNumbers target_shares;
    rows.target_shares(tile, target_shares);
    TileNumbers scales = {};
    for (int64_t i = 0; i < tile.rows; ++i) scales[i] = inputs.scale(first + i);
    gradient(tile, memory, known, reference, target_shares, rows.z_loss(), scales,
             grad.at(first, 0), grad.layout());
  });
}

}  // namespace ampfuse
