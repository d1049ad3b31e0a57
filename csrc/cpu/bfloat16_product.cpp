// Both operands are copied into panels. A panel holds a few rows of a, or columns of b, in the
// order in which they are multiplied: first the pair of elements k = 0 and 1 of each row, then the
// pair k = 2 and 3, and so on. One instruction multiplies a pair of one row of a by the pairs of 16
// columns of b, and adds both products to 16 sums.
//
// The smaller operand is packed first, because it is read repeatedly. The threads then share the
// lines of the other operand, and for each group of lines the panels of the smaller one, so that
// all have the same work. A thread packs a group and one block of k at a time, so that these panels
// stay in its cache; threads that share a group pack it each.
#include "bfloat16_product.h"

#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <algorithm>
#include <cstring>

#include "capability.h"

#if defined(AMPFUSE_X86)
#include <immintrin.h>
// Enables the instructions only for the functions in this file. A compiler flag would also enable
// them for inline functions of headers, which must run on any processor.
#define AMPFUSE_BF16_INSTRUCTIONS \
  __attribute__((target("avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")))
#endif

namespace ampfuse {

#if defined(AMPFUSE_X86)

namespace {

using Pair = uint32_t;  // two bfloat16 numbers
constexpr int64_t kLanes = 16;
constexpr int64_t kRows = 8;              // rows in a panel of a
constexpr int64_t kColumns = 3 * kLanes;  // columns in a panel of b: 24 registers hold the sums
constexpr int64_t kBlock = 512;           // pairs: 16 KiB of a panel of a, 96 KiB of a panel of b
constexpr int64_t kKeptPairs = 4096;      // pairs of the smaller operand that are packed at a time
constexpr int64_t kGroup = 96;            // rows or columns that a thread takes at a time
static_assert(kGroup % kRows == 0 && kGroup % kColumns == 0);

// An operand as lines along k, the dimension that is summed: rows of a, or columns of b.
struct Lines {
  const uint16_t* data;
  int64_t line_stride;
  int64_t k_stride;
  int64_t count;
  int64_t k;
};

// Transposes 16 lines of 16 pairs each.
AMPFUSE_BF16_INSTRUCTIONS void transpose(__m512i (&x)[kLanes]) {
  // gcc 12 warns that the functions without a mask read numbers that are not initialised.
  constexpr __mmask16 kAll = 0xffff;
  __m512i y[kLanes];
#pragma GCC unroll 8
  for (int i = 0; i < 16; i += 2) {
    y[i] = _mm512_maskz_unpacklo_epi32(kAll, x[i], x[i + 1]);
    y[i + 1] = _mm512_maskz_unpackhi_epi32(kAll, x[i], x[i + 1]);
  }
  // x[i + j] then has columns j, j + 4, j + 8 and j + 12 of lines i to i + 3, in 128 bits each.
#pragma GCC unroll 4
  for (int i = 0; i < 16; i += 4) {
    x[i] = _mm512_maskz_unpacklo_epi64(0xff, y[i], y[i + 2]);
    x[i + 1] = _mm512_maskz_unpackhi_epi64(0xff, y[i], y[i + 2]);
    x[i + 2] = _mm512_maskz_unpacklo_epi64(0xff, y[i + 1], y[i + 3]);
    x[i + 3] = _mm512_maskz_unpackhi_epi64(0xff, y[i + 1], y[i + 3]);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    y[j] = _mm512_maskz_shuffle_i32x4(kAll, x[j], x[j + 4], 0x88);
    y[j + 4] = _mm512_maskz_shuffle_i32x4(kAll, x[j], x[j + 4], 0xdd);
    y[j + 8] = _mm512_maskz_shuffle_i32x4(kAll, x[j + 8], x[j + 12], 0x88);
    y[j + 12] = _mm512_maskz_shuffle_i32x4(kAll, x[j + 8], x[j + 12], 0xdd);
  }
#pragma GCC unroll 4
  for (int j = 0; j < 4; ++j) {
    x[j] = _mm512_maskz_shuffle_i32x4(kAll, y[j], y[j + 8], 0x88);
    x[j + 4] = _mm512_maskz_shuffle_i32x4(kAll, y[j + 4], y[j + 12], 0x88);
    x[j + 8] = _mm512_maskz_shuffle_i32x4(kAll, y[j], y[j + 8], 0xdd);
    x[j + 12] = _mm512_maskz_shuffle_i32x4(kAll, y[j + 4], y[j + 12], 0xdd);
  }
}

// Packs `pairs` whole pairs of `count` lines that are contiguous along k, from `from` on.
AMPFUSE_BF16_INSTRUCTIONS void pack_contiguous(const uint16_t* from, int64_t line_stride,
                                               int64_t count, int64_t width, int64_t pairs,
                                               Pair* panel) {
  for (int64_t line = 0; line < count; line += kLanes) {
    const int64_t lines = std::min(kLanes, count - line);
    const auto some_lines = static_cast<__mmask16>((1u << lines) - 1);
    for (int64_t p = 0; p < pairs; p += kLanes) {
      const int64_t here = std::min(kLanes, pairs - p);
      const auto some_pairs = static_cast<__mmask16>((1u << here) - 1);
      __m512i x[kLanes];
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) {
        const __mmask16 mask = i < lines ? some_pairs : __mmask16{0};
        const int64_t there = line + std::min(i, lines - 1);
        x[i] = _mm512_maskz_loadu_epi32(mask, from + there * line_stride + 2 * p);
      }
      transpose(x);
      Pair* const to = panel + p * width + line;
#pragma GCC unroll 16
      for (int64_t i = 0; i < kLanes; ++i) {
        if (i < here) _mm512_mask_storeu_epi32(to + i * width, some_lines, x[i]);
      }
    }
  }
}

// Packs `pairs` pairs from `first_k` on, of `width` lines from `first` on. Elements after the end
// are zeros.
AMPFUSE_BF16_INSTRUCTIONS void pack_panel(const Lines& lines, int64_t first, int64_t width,
                                          int64_t first_k, int64_t pairs, Pair* panel) {
  const int64_t here = std::min(width, lines.count - first);
  const int64_t whole = std::min(pairs, (lines.k - first_k) / 2);
  if (here < width || whole < pairs) std::memset(panel, 0, width * pairs * sizeof(Pair));
  if (lines.k_stride == 1) {
    pack_contiguous(lines.data + first * lines.line_stride + first_k, lines.line_stride, here,
                    width, whole, panel);
  } else {
    for (int64_t p = 0; p < whole; ++p) {
      const uint16_t* const low = lines.data + (first_k + 2 * p) * lines.k_stride + first;
      const uint16_t* const high = low + lines.k_stride;
      Pair* const to = panel + p * width;
      for (int64_t line = 0; line < here; ++line) {
        to[line] = Pair{low[line]} | Pair{high[line]} << 16;
      }
    }
  }
  if (whole == pairs) return;
  for (int64_t line = 0; line < here; ++line) {  // k is odd: the last element has no pair
    panel[whole * width + line] =
        lines.data[(first + line) * lines.line_stride + (first_k + 2 * whole) * lines.k_stride];
  }
}

// Computes the kRows · kColumns sums of two panels, and writes or adds the first `rows` · `columns`
// of them to c.
AMPFUSE_BF16_INSTRUCTIONS void multiply(const Pair* a, const Pair* b, int64_t pairs, int64_t rows,
                                        int64_t columns, bool add, float* c, int64_t c_stride) {
  __m512 sums[kRows][3];
#pragma GCC unroll 8
  for (int64_t row = 0; row < kRows; ++row) {
#pragma GCC unroll 3
    for (int64_t v = 0; v < 3; ++v) sums[row][v] = _mm512_setzero_ps();
  }
  for (int64_t p = 0; p < pairs; ++p, a += kRows, b += kColumns) {
    const auto b0 = (__m512bh)_mm512_loadu_si512(b);
    const auto b1 = (__m512bh)_mm512_loadu_si512(b + kLanes);
    const auto b2 = (__m512bh)_mm512_loadu_si512(b + 2 * kLanes);
#pragma GCC unroll 8
    for (int64_t row = 0; row < kRows; ++row) {
      const auto pair = (__m512bh)_mm512_set1_epi32(static_cast<int>(a[row]));
      sums[row][0] = _mm512_dpbf16_ps(sums[row][0], pair, b0);
      sums[row][1] = _mm512_dpbf16_ps(sums[row][1], pair, b1);
      sums[row][2] = _mm512_dpbf16_ps(sums[row][2], pair, b2);
    }
  }
#pragma GCC unroll 8
  for (int64_t row = 0; row < kRows; ++row) {
    if (row >= rows) break;
#pragma GCC unroll 3
    for (int64_t v = 0; v < 3; ++v) {
      const int64_t left = std::clamp<int64_t>(columns - v * kLanes, 0, kLanes);
      const auto mask = static_cast<__mmask16>((1u << left) - 1);
      float* const to = c + row * c_stride + v * kLanes;
      const __m512 before = add ? _mm512_maskz_loadu_ps(mask, to) : _mm512_setzero_ps();
      _mm512_mask_storeu_ps(to, mask, _mm512_add_ps(before, sums[row][v]));
    }
  }
}

int64_t panels_of(int64_t count, int64_t width) {
  return (count + width - 1) / width;
}

struct Memory {
  explicit Memory(int64_t pairs) : data(c10::GetCPUAllocator()->allocate(pairs * sizeof(Pair))) {}
  Pair* get() const { return static_cast<Pair*>(data.get()); }
  c10::DataPtr data;
};

}  // namespace

bool has_bfloat16_product() {
  return capability() == Capability::kAvx512 && __builtin_cpu_supports("avx512bf16");
}

void bfloat16_product(const BFloat16Matrix& a, const BFloat16Matrix& b, int64_t m, int64_t n,
                      int64_t k, bool add, float* c, int64_t c_stride) {
  const Lines rows = {static_cast<const uint16_t*>(a.data), a.row_stride, a.column_stride, m, k};
  const Lines columns = {static_cast<const uint16_t*>(b.data), b.column_stride, b.row_stride, n, k};
  const bool a_is_kept = m <= n;
  const Lines& kept = a_is_kept ? rows : columns;
  const Lines& passing = a_is_kept ? columns : rows;
  const int64_t kept_width = a_is_kept ? kRows : kColumns;
  const int64_t passing_width = a_is_kept ? kColumns : kRows;
  const int64_t kept_panels = panels_of(kept.count, kept_width);
  const Memory kept_memory(kept_panels * kept_width * std::min(kKeptPairs, (k + 1) / 2));
  for (int64_t first_k = 0; first_k < k; first_k += 2 * kKeptPairs) {
    const int64_t pairs = std::min(kKeptPairs, (k - first_k + 1) / 2);
    const auto kept_panel = [&](int64_t panel) {
      return kept_memory.get() + panel * kept_width * pairs;
    };
    at::parallel_for(0, kept_panels, 1, [&](int64_t begin, int64_t end) {
      for (int64_t panel = begin; panel < end; ++panel) {
        pack_panel(kept, panel * kept_width, kept_width, first_k, pairs, kept_panel(panel));
      }
    });
    const int64_t groups = panels_of(passing.count, kGroup);
    at::parallel_for(0, groups * kept_panels, 1, [&](int64_t begin, int64_t end) {
      const Memory memory(kGroup * kBlock);
      for (int64_t group = begin / kept_panels; group * kept_panels < end; ++group) {
        const int64_t first = group * kGroup;
        const int64_t first_kept = std::max<int64_t>(begin - group * kept_panels, 0);
        const int64_t end_kept = std::min(end - group * kept_panels, kept_panels);
        const int64_t panels = panels_of(std::min(kGroup, passing.count - first), passing_width);
        for (int64_t done = 0; done < pairs; done += kBlock) {
          const int64_t some = std::min(kBlock, pairs - done);
          const auto passing_panel = [&](int64_t panel) {
            return memory.get() + panel * passing_width * some;
          };
          for (int64_t p = 0; p < panels; ++p) {
            pack_panel(passing, first + p * passing_width, passing_width, first_k + 2 * done, some,
                       passing_panel(p));
          }
          for (int64_t q = first_kept; q < end_kept; ++q) {
            const Pair* const here = kept_panel(q) + done * kept_width;
            for (int64_t p = 0; p < panels; ++p) {
              const int64_t row = a_is_kept ? q * kRows : first + p * kRows;
              const int64_t column = a_is_kept ? first + p * kColumns : q * kColumns;
              multiply(a_is_kept ? here : passing_panel(p), a_is_kept ? passing_panel(p) : here,
                       some, std::min(kRows, m - row), std::min(kColumns, n - column),
                       add || first_k + done > 0, c + row * c_stride + column, c_stride);
            }
          }
        }
      }
    });
  }
}

#else

bool has_bfloat16_product() {
  return false;
}

void bfloat16_product(const BFloat16Matrix&, const BFloat16Matrix&, int64_t, int64_t, int64_t, bool,
                      float*, int64_t) {}

#endif

}  // namespace ampfuse
