// Norms of a list of tensors, in three steps that every backend shares:
//
//   1. a chunk of at most kNormChunk elements becomes one NormPartial, its own norm in double;
//   2. the partials of a tensor become the tensor's norm;
//   3. the tensors' norms become the total.
//
// A chunk never crosses tensors, and the order of additions inside a step depends on the counts
// and, where a kernel reads 16 bytes at a time, on the alignment of the first element. So the bits
// do not depend on threads, launches or neighbours in the list.
#pragma once

#include <cmath>
#include <cstdint>
#include <limits>

#include "complex.h"
#include "lane.h"

namespace ampfuse::math {

enum class NormType { kL1, kL2, kInf };

inline constexpr int64_t kNormChunk = 8192;

struct NormPartial {
  double norm;
  int64_t nonfinite;  // 0 or 1: some element is NaN or infinite
};

// A running sum of |x|, of x² or the running maximum of |x|.
template <NormType kNorm, typename V>
AMPFUSE_HOST_DEVICE V norm_accumulate(V sum, V x) {
  if constexpr (kNorm == NormType::kL1) return sum + Lane<V>::abs(x);
  if constexpr (kNorm == NormType::kL2) return sum + x * x;
  if constexpr (kNorm == NormType::kInf) return Lane<V>::larger(sum, Lane<V>::abs(x));
}

// Joins two running values.
template <NormType kNorm, typename V>
AMPFUSE_HOST_DEVICE V norm_join(V a, V b) {
  if constexpr (kNorm == NormType::kInf) return Lane<V>::larger(a, b);
  return a + b;
}

// From a running value to a norm.
template <NormType kNorm>
AMPFUSE_HOST_DEVICE double norm_finish(double sum) {
  if constexpr (kNorm == NormType::kL2) return std::sqrt(sum);
  return sum;
}

// Whether a sum of scalar_t elements that was kept in acc_t is both proof that every element is
// finite and accurate. It is neither when it overflowed, and not accurate when squares underflowed:
// below `smallest` the bits they lost (under 2⁻¹⁴⁹ each in fp32, 2⁻¹⁰⁷⁴ in fp64) times kNormChunk
// could show. Squares of narrower types fit a double whole. What is out of range, zeros included
// where squares can underflow, is read again by norm_exact.
template <NormType kNorm, typename scalar_t, typename acc_t>
AMPFUSE_HOST_DEVICE bool norm_in_range(double sum) {
  if (!is_finite(sum)) return false;
  if constexpr (kNorm == NormType::kL2 && !(sizeof(acc_t) == 8 && sizeof(scalar_t) < 8)) {
    return sum >= (sizeof(acc_t) == 4 ? 0x1p-100 : 0x1p-1000);
  }
  return true;
}

// The power of two that brings `largest` into [1, 2) or close: multiplying by it rounds nothing,
// and the squares of what is scaled neither overflow nor underflow where it would matter.
template <NormType kNorm>
AMPFUSE_HOST_DEVICE double norm_scale(double largest) {
  if constexpr (kNorm == NormType::kL2) {
    if (largest > 0 && is_finite(largest)) {
      const int exponent = std::ilogb(largest);
      // Within the normal numbers, for threads that flush the others to zero.
      return std::ldexp(1.0, exponent < -1022 ? 1022 : exponent > 1022 ? -1022 : -exponent);
    }
  }
  return 1;
}

// An element as the number that counts: complex ones by their magnitude.
template <typename acc_t, typename scalar_t>
AMPFUSE_HOST_DEVICE acc_t norm_value(scalar_t x) {
  return static_cast<acc_t>(x);
}
template <typename acc_t, typename T>
AMPFUSE_HOST_DEVICE acc_t norm_value(Complex<T> x) {
  return magnitude(x);
}

// An element as a part of a norm: its magnitude, and whether it is a number at all. The magnitude
// of finite complex doubles can be infinite, so that does not tell.
template <typename scalar_t>
AMPFUSE_HOST_DEVICE NormPartial norm_part(scalar_t x) {
  const double value = norm_value<double>(x);
  return {std::fabs(value), is_finite(value) ? 0 : 1};
}
template <typename T>
AMPFUSE_HOST_DEVICE NormPartial norm_part(Complex<T> x) {
  return {magnitude(x), is_finite(x) ? 0 : 1};
}

// Who shares the work of norm_exact: a thread alone, or the threads of a warp or a block, which
// then bring their own `join`.
struct OneWorker {
  AMPFUSE_HOST_DEVICE int index() const { return 0; }
  AMPFUSE_HOST_DEVICE int count() const { return 1; }
  template <NormType kNorm>
  AMPFUSE_HOST_DEVICE double join(double x) const {
    return x;
  }
};

// The norm of `count` parts, right for every magnitude a double can hold. Reads twice, so it is
// for what is rare: sums that left norm_in_range.
template <NormType kNorm, typename Part, typename Workers>
AMPFUSE_HOST_DEVICE NormPartial norm_exact(int64_t count, const Part& part,
                                           const Workers& workers) {
  if (count == 1) return part(0);
  double largest = 0;
  double nonfinite = 0;
  for (int64_t i = workers.index(); i < count; i += workers.count()) {
    const NormPartial p = part(i);
    if (p.norm > largest) largest = p.norm;  // passes over NaN: it enters through the sum
    if (p.nonfinite) nonfinite = 1;
  }
  largest = workers.template join<NormType::kInf>(largest);
  nonfinite = workers.template join<NormType::kInf>(nonfinite);

  if (largest == 0 && nonfinite == 0) return {0, 0};

  const double scale = norm_scale<kNorm>(largest);
  double sum = 0;
  for (int64_t i = workers.index(); i < count; i += workers.count()) {
    sum = norm_accumulate<kNorm>(sum, part(i).norm * scale);
  }
  sum = workers.template join<kNorm>(sum);
  return {norm_finish<kNorm>(sum) / scale, nonfinite != 0 ? 1 : 0};
}

// The norm of `count` parts from one read, where the sum stays in range, and else by norm_exact.
template <NormType kNorm, typename Part, typename Workers>
AMPFUSE_HOST_DEVICE NormPartial norm_of_parts(int64_t count, const Part& part,
                                              const Workers& workers) {
  if (count == 1) return part(0);
  double sum = 0;
  double nonfinite = 0;
  // Several parts on their way before the first is needed.
#if defined(__CUDA_ARCH__)
#pragma unroll 8
#endif
  for (int64_t i = workers.index(); i < count; i += workers.count()) {
    const NormPartial p = part(i);
    sum = norm_accumulate<kNorm>(sum, p.norm);
    if (p.nonfinite) nonfinite = 1;
  }
  sum = workers.template join<kNorm>(sum);
  nonfinite = workers.template join<NormType::kInf>(nonfinite);
  if (norm_in_range<kNorm, double, double>(sum)) {
    return {norm_finish<kNorm>(sum), nonfinite != 0 ? 1 : 0};
  }
  return norm_exact<kNorm>(count, part, workers);
}

}  // namespace ampfuse::math
