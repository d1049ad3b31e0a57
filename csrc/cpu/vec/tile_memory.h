// Tiles between where they come from and [classes][kTileRows] of what is computed with.
#pragma once

#include <cstring>

#include "convert.h"
#include "cross_entropy_tile.h"
#include "logits.h"

namespace ampfuse::CPU_CAPABILITY {

/// The arrays that tile_bytes() counts, of those that are needed.
template <typename A>
struct TileMemory {
  A* exponentials;
  A* lows;    // what these lack in fp32
  A* slopes;  // of z
  A* probabilities;
  A* moving;  // on the way from or to rows

  TileMemory(const Tile& tile, void* memory) {
    auto* next = static_cast<A*>(memory);
    const auto take = [&](bool is_needed) {
      A* const array = next;
      if (is_needed) next += tile.classes * kTileRows;
      return array;
    };
    exponentials = take(true);
    lows = take(tile.dtype == c10::ScalarType::Float);
    slopes = take(tile.softcap != 0);
    probabilities = take(!tile.has_targets());
    moving = take(tile.layout.by_row);
  }
};

/// A logit as it is, in memory.
template <typename scalar_t>
double raw_logit(const Tile& tile, int64_t row, int64_t c) {
  const int64_t stride = tile.layout.stride;
  const int64_t at = tile.layout.by_row ? row * stride + c : c * stride + row;
  return static_cast<acc_t<scalar_t>>(static_cast<const scalar_t*>(tile.logits)[at]);
}

// A count that is known when compiled, so that its loops are.
inline constexpr std::integral_constant<int64_t, kTileRows> kWholeTile;

// Numbers to or from what is computed with, as they are where that is the same.
template <typename From, typename To>
void convert(const From* from, To* to, int64_t count) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, count * sizeof(To));
  } else if constexpr (kIsNarrow<From>) {
    widen(from, to, count);
  } else {
    narrow(from, to, count);
  }
}

// to[column][row] = from[row][column]
template <int64_t kRows, typename A>
void transpose_rows(const A* from, int64_t from_stride, A* to, int64_t to_stride, int64_t columns) {
  for (int64_t c = 0; c < columns; ++c) {
#pragma GCC unroll 32
    for (int64_t row = 0; row < kRows; ++row) to[c * to_stride + row] = from[row * from_stride + c];
  }
}

/// Lanes without rows get 0.
template <typename From, typename A>
void load_tile(const void* data, TileLayout layout, int64_t rows, int64_t classes, A* moving,
               A* to) {
  const auto* const from = static_cast<const From*>(data);
  if (rows < kTileRows) std::fill_n(to, classes * kTileRows, A(0));
  if (!layout.by_row) {
    const auto load = [&](auto count) {
      for (int64_t c = 0; c < classes; ++c) {
        convert(from + c * layout.stride, to + c * kTileRows, count);
      }
    };
    rows == kTileRows ? load(kWholeTile) : load(rows);
    return;
  }
  for (int64_t row = 0; row < rows; ++row) {
    convert(from + row * layout.stride, moving + row * classes, classes);
  }
  if (rows == kTileRows) {
    transpose_rows<kTileRows>(moving, classes, to, kTileRows, classes);
  } else {
    for (int64_t row = 0; row < rows; ++row) {
      transpose_rows<1>(moving + row * classes, classes, to + row, kTileRows, classes);
    }
  }
}

template <typename To, typename A>
void store_tile(const A* from, int64_t rows, int64_t classes, A* moving, void* data,
                TileLayout layout) {
  auto* const to = static_cast<To*>(data);
  if (!layout.by_row) {
    const auto store = [&](auto count) {
      for (int64_t c = 0; c < classes; ++c) {
        convert(from + c * kTileRows, to + c * layout.stride, count);
      }
    };
    rows == kTileRows ? store(kWholeTile) : store(rows);
    return;
  }
  for (int64_t c = 0; c < classes; ++c) {
    for (int64_t row = 0; row < rows; ++row) moving[row * classes + c] = from[c * kTileRows + row];
  }
  for (int64_t row = 0; row < rows; ++row) {
    convert(moving + row * classes, to + row * layout.stride, classes);
  }
}

}  // namespace ampfuse::CPU_CAPABILITY
