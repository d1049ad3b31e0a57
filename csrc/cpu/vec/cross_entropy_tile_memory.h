// Tiles between where they come from and [classes][kTileRows] of what is computed with.
#pragma once

#include <cstring>

#include "convert.h"
#include "cross_entropy_logits.h"
#include "cross_entropy_tile.h"

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
    slopes = take(tile.terms.softcap != 0);
    probabilities = take(!tile.has_targets());
    moving = take(tile.layout.by_row);
  }
};

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

// to[column][row] = from[row][column]. Flattened, so that blocks of known size are known as such:
// they would go through memory else.
template <typename A>
[[gnu::flatten]] void transpose(const A* from, int64_t from_stride, int64_t rows, int64_t columns,
                                A* to, int64_t to_stride) {
  constexpr int64_t kBlock = 16;  // what at::vec has instructions for
  const int64_t block_rows = rows / kBlock * kBlock;
  const int64_t block_columns = columns / kBlock * kBlock;
  for (int64_t row = 0; row < block_rows; row += kBlock) {
    for (int64_t column = 0; column < block_columns; column += kBlock) {
      at::vec::transpose_mxn<A, kBlock, kBlock>(from + row * from_stride + column, from_stride,
                                                to + column * to_stride + row, to_stride);
    }
  }
  const auto rest = [&](int64_t first_row, int64_t first_column, int64_t end_column) {
    for (int64_t column = first_column; column < end_column; ++column) {
      for (int64_t row = first_row; row < rows; ++row) {
        to[column * to_stride + row] = from[row * from_stride + column];
      }
    }
  };
  rest(block_rows, 0, block_columns);
  rest(0, block_columns, columns);
}

// As convert() for rows of so many classes.
template <typename From, typename To>
void convert_rows(const From* from, int64_t from_stride, To* to, int64_t to_stride, int64_t rows,
                  int64_t classes) {
  if (from_stride == classes && to_stride == classes) return convert(from, to, rows * classes);
  for (int64_t row = 0; row < rows; ++row) {
    convert(from + row * from_stride, to + row * to_stride, classes);
  }
}

// Asks for the same class of the next tile, a cache line of 64 bytes at a time. Processors do not
// expect it by themselves: each class lies in a page of its own.
template <typename T>
void expect_next(const T* here) {
  for (int64_t i = 0; i < kTileRows; i += 64 / sizeof(T)) __builtin_prefetch(here + kTileRows + i);
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
        const From* const here = from + c * layout.stride;
        expect_next(here);
        convert(here, to + c * kTileRows, count);
      }
    };
    rows == kTileRows ? load(kWholeTile) : load(rows);
  } else if constexpr (std::is_same_v<From, A>) {
    transpose(from, layout.stride, rows, classes, to, kTileRows);
  } else {
    convert_rows(from, layout.stride, moving, classes, rows, classes);
    transpose(moving, classes, rows, classes, to, kTileRows);
  }
}

template <typename To, typename A>
void store_tile(const A* from, int64_t rows, int64_t classes, A* moving, void* data,
                TileLayout layout) {
  auto* const to = static_cast<To*>(data);
  if (!layout.by_row) {
    for (int64_t c = 0; c < classes; ++c) {
      convert(from + c * kTileRows, to + c * layout.stride, rows);
    }
  } else if constexpr (std::is_same_v<To, A>) {
    transpose(from, kTileRows, classes, rows, to, layout.stride);
  } else {
    transpose(from, kTileRows, classes, rows, moving, classes);
    convert_rows(moving, classes, to, layout.stride, rows, classes);
  }
}

}  // namespace ampfuse::CPU_CAPABILITY
