// Threads share tiles of rows. The sums of the tiles' losses are added in the order of the tiles.
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include "cross_entropy_passes.h"

namespace ampfuse {

namespace {

// Calls visit(tile, index of the tile, location of its first row, memory) for each tile.
template <typename Visit>
void each_tile(const CpuRows& rows, const Visit& visit) {
  at::parallel_for(0, rows.tiles(), worth_a_thread(rows.classes() * kTileRows),
                   [&](int64_t begin, int64_t end) {
                     const Tile any = rows.tile(rows.first_row_of(begin));
                     const auto memory = c10::GetCPUAllocator()->allocate(tile_bytes(any));
                     for (int64_t number = begin; number < end; ++number) {
                       const RowLocation first = rows.first_row_of(number);
                       visit(rows.tile(first), number, first, memory.get());
                     }
                   });
}

void put_losses(const Tile& tile, const TileLoss& loss, int64_t number, int64_t first,
                const ForwardResults& results) {
  if (results.is_per_row) {
    for (int64_t i = 0; i < tile.rows; ++i) results.row_losses.put(first + i, loss.loss[i]);
  } else {
    results.losses[number] = loss.total;
  }
}

void put_statistics(const Tile& tile, const TileStatistics& known, math::RowStatistics* to) {
  for (int64_t i = 0; i < tile.rows; ++i) {
    to[i] = {known.largest[i], known.sum[i], known.others[i], known.masses[i]};
  }
}

TileStatistics statistics_of(const CpuRows& rows, const Tile& tile, int64_t first,
                             const math::RowStatistics* of_rows) {
  TileStatistics known = {};
  for (int64_t i = 0; i < tile.rows; ++i) {
    const math::RowStatistics row = rows.statistics(of_rows, first + i);
    known.largest[i] = row.largest;
    known.sum[i] = row.sum;
    known.others[i] = row.others;
    known.masses[i] = row.masses;
  }
  return known;
}

}  // namespace

void forward_by_tile(const CpuRows& rows, double scale, const ForwardResults& results) {
  const auto partial_of = AMPFUSE_CHOOSE(tile_partial);
  const auto loss_of = AMPFUSE_CHOOSE(tile_loss);
  const auto gradient = AMPFUSE_CHOOSE(tile_gradient);
  TileNumbers scales;
  std::fill_n(scales, kTileRows, scale);
  each_tile(rows, [&](const Tile& tile, int64_t number, const RowLocation& first, void* memory) {
    TilePartial partial;
    int64_t argmax[kTileRows];
    TileTargets targets;
    partial_of(tile, memory, partial, targets, results.with_metrics ? argmax : nullptr);
    TileLoss loss;
    loss_of(tile, partial, targets, results.with_metrics, loss);
    put_losses(tile, loss, number, first.row, results);
    if (results.statistics != nullptr) {
      put_statistics(tile, loss.statistics, results.statistics + first.row);
    }
    if (results.with_metrics) {
      std::copy_n(argmax, tile.rows, results.argmax + first.row);
      for (int64_t i = 0; i < tile.rows; ++i) {
        results.lse.put(first.row + i, loss.lse[i]);
        results.entropy.put(first.row + i, loss.entropy[i]);
      }
    }
    if (results.grad.is_wanted()) {
      gradient(tile, memory, loss.statistics, partial.reference, targets, scales,
               results.grad.at(first), results.grad.dtype(), results.grad.tile_layout());
    }
  });
}

void shard_by_tile(const CpuRows& rows, const ShardResults& results) {
  const auto partial_of = AMPFUSE_CHOOSE(tile_partial);
  const bool with_metrics = results.argmax != nullptr;
  each_tile(rows, [&](const Tile& tile, int64_t, const RowLocation& first, void* memory) {
    TilePartial partial;
    int64_t argmax[kTileRows];
    TileTargets targets;
    partial_of(tile, memory, partial, targets, with_metrics ? argmax : nullptr);
    for (int64_t i = 0; i < tile.rows; ++i) {
      const math::RowPartial<double> others = {partial.largest[i], partial.reference[i],
                                               partial.sum[i],     partial.masses[i],
                                               partial.spread[i],  partial.entropy[i]};
      results.partials[first.row + i] =
          math::shard_partial(others, rows.row_target(first.row + i), rows.classes(), with_metrics);
    }
    if (with_metrics) {
      std::copy_n(argmax, tile.rows, results.argmax + first.row);
    }
  });
}

void backward_by_tile(const CpuRows& rows, const BackwardInputs& inputs, const RowWriter& grad) {
  const auto exponentials = AMPFUSE_CHOOSE(tile_exponentials);
  const auto gradient = AMPFUSE_CHOOSE(tile_gradient);
  each_tile(rows, [&](const Tile& tile, int64_t, const RowLocation& first, void* memory) {
    const TileStatistics known = statistics_of(rows, tile, first.row, inputs.statistics);
    TileNumbers reference;
    TileTargets targets;
    exponentials(tile, memory, known.largest, reference, targets);
    TileNumbers scales = {};
    for (int64_t i = 0; i < tile.rows; ++i) scales[i] = inputs.scale(first.row + i);
    gradient(tile, memory, known, reference, targets, scales, grad.at(first), grad.dtype(),
             grad.tile_layout());
  });
}

}  // namespace ampfuse
