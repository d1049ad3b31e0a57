// Moves tiles between tensors and arrays [classes][kTileRows] of the arithmetic's type.
#pragma once

#include <cstring>

#include "convert.h"
#include "cross_entropy_logits.h"
#include "cross_entropy_tile.h"

namespace ampfuse::CPU_CAPABILITY {

/// The arrays that tile_bytes() counts. Only those that the tile needs have memory of their own.
template <typename A>
struct TileMemory {
  A* exponentials;
  A* lows;    // low parts of the exponentials of fp32 logits
  A* slopes;  // dz/dx
  A* probabilities;
  A* moving;  // buffer for rows that are transposed

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

// kTileRows as a compile-time constant, so that the compiler knows the length of loops.
inline constexpr std::integral_constant<int64_t, kTileRows> kWholeTile;

// Converts numbers to or from the arithmetic's type, or copies them if the types are equal.
template <typename From, typename To>
void convert(const From* from, To* to, int64_t count) {
  if constexpr (std::is_same_v<From, To>) {
    std::memcpy(to, from, count * sizeof(To));
  } else if constexpr (kIs16Bit<From>) {
    widen(from, to, count);
  } else {
    narrow(from, to, count);
  }
}

// Computes to[column][row] = from[row][column]. gnu::flatten inlines all calls. The compiler
// then knows the size of the blocks and keeps them in registers.
template <typename A>
[[gnu::flatten]] void transpose(const A* from, int64_t from_stride, int64_t rows, int64_t columns,
                                A* to, int64_t to_stride) {
  constexpr int64_t kBlock = 16;  // at::vec has instructions for blocks of this size
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

// Like convert(), for rows of `classes` numbers.
template <typename From, typename To>
void convert_rows(const From* from, int64_t from_stride, To* to, int64_t to_stride, int64_t rows,
                  int64_t classes) {
  if (from_stride == classes && to_stride == classes) return convert(from, to, rows * classes);
  for (int64_t row = 0; row < rows; ++row) {
    convert(from + row * from_stride, to + row * to_stride, classes);
  }
}

// Prefetches the same class of the next tile, one cache line of 64 bytes at a time. The hardware
// does not prefetch it, because each class is in another page.
template <typename T>
void prefetch_next(const T* class_rows) {
  for (int64_t i = 0; i < kTileRows; i += 64 / sizeof(T))
    __builtin_prefetch(class_rows + kTileRows + i);
}

/// Loads a tile. Lanes without a row become 0.
template <typename From, typename A>
void load_tile(const void* data, TileLayout layout, int64_t rows, int64_t classes, A* moving,
               A* to) {
  const auto* const from = static_cast<const From*>(data);
  if (rows < kTileRows) std::fill_n(to, classes * kTileRows, A(0));
  if (!layout.by_row) {
    const auto load = [&](auto count) {
      for (int64_t c = 0; c < classes; ++c) {
        const From* const class_rows = from + c * layout.stride;
        prefetch_next(class_rows);
        convert(class_rows, to + c * kTileRows, count);
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
