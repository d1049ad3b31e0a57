// Products of bfloat16 matrices with float results, on processors with bfloat16 instructions.
#pragma once

#include <cstdint>

namespace ampfuse {

/// True if this processor has the instructions (AVX512-BF16) and torch uses AVX-512.
bool has_bfloat16_product();

/// A matrix. One of its strides must be 1.
struct BFloat16Matrix {
  const void* data;
  int64_t row_stride;
  int64_t column_stride;
};

/// Computes c = a · b, or c += a · b if `add`, with a [m, k], b [k, n] and c [m, n]. The rows of c
/// are contiguous and `c_stride` floats apart. m, n and k must not be 0. Products are added in the
/// order of k, whatever the number of threads.
void bfloat16_product(const BFloat16Matrix& a, const BFloat16Matrix& b, int64_t m, int64_t n,
                      int64_t k, bool add, float* c, int64_t c_stride);

}  // namespace ampfuse
