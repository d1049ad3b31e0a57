// Products of bfloat16 matrices in float, on processors that multiply these numbers themselves.
#pragma once

#include <cstdint>

namespace ampfuse {

/// Whether this is such a processor.
bool has_bfloat16_product();

/// A matrix, of whose strides one is 1.
struct BFloat16Matrix {
  const void* data;
  int64_t row_stride;
  int64_t column_stride;
};

/// c = a · b, or c += a · b: [m, n] of [m, k] and [k, n]; c's rows are in one piece, so many floats
/// apart, and k is not 0. Each number is added up in the order of k, whatever the number of
/// threads.
void bfloat16_product(const BFloat16Matrix& a, const BFloat16Matrix& b, int64_t m, int64_t n,
                      int64_t k, bool add, float* c, int64_t c_stride);

}  // namespace ampfuse
