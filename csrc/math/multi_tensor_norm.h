// Norms of a list of tensors, in three steps that all backends share:
//
//   1. reduce each chunk of at most kNormChunk elements to one NormPartial, its norm in double;
//   2. combine the partials of a tensor into the norm of the tensor;
//   3. combine the norms of the tensors into the total norm.
//
// A chunk never crosses tensors. The order of additions within a step depends only on the counts
// and, if a kernel reads 16 bytes at a time, on the alignment of the first element. So the bits of
// a result do not depend on threads, launches or neighbours in the list.
#pragma once

#include <cmath>
#include <cstdint>

#include "complex.h"
#include "lane.h"

namespace ampfuse::math {

enum class NormType { kL1, kL2, kInf };

inline constexpr int64_t kNormChunk = 8192;

struct NormPartial {
  double norm;
  int64_t nonfinite;  // 1 if some element is NaN or infinite, else 0
};

// Updates a running value with x: the sum of |x|, the sum of x² or the maximum of |x|.
template <NormType kNorm, typename V>
AMPFUSE_HOST_DEVICE V norm_accumulate(V sum, V x) {
  if constexpr (kNorm == NormType::kL1) return sum + Lane<V>::abs(x);
  if constexpr (kNorm == NormType::kL2) return sum + x * x;
  if constexpr (kNorm == NormType::kInf) return Lane<V>::larger(sum, Lane<V>::abs(x));
}

// Combines two running values.
template <NormType kNorm, typename V>
AMPFUSE_HOST_DEVICE V norm_join(V a, V b) {
  if constexpr (kNorm == NormType::kInf) return Lane<V>::larger(a, b);
  return a + b;
}

// Converts a running value to a norm.
template <NormType kNorm>
AMPFUSE_HOST_DEVICE double norm_finish(double sum) {
  if constexpr (kNorm == NormType::kL2) return std::sqrt(sum);
  return sum;
}

// Returns true if the sum over scalar_t elements, accumulated in acc_t, is accurate and proves that
// every element is finite. An overflowed sum is not accurate and proves nothing. A sum of squares
// is inaccurate if squares underflowed: each of kNormChunk squares may lose up to 2⁻¹⁴⁹ in fp32
// (2⁻¹⁰⁷⁴ in fp64). This is negligible in sums of at least 2⁻¹⁰⁰ (2⁻¹⁰⁰⁰). Smaller sums, also 0,
// are out of range. A double sum of narrower elements has no such limit, since a double holds their
// squares exactly. If the sum is out of range, norm_exact reads the elements again.
template <NormType kNorm, typename scalar_t, typename acc_t>
AMPFUSE_HOST_DEVICE bool norm_in_range(double sum) {
  if (!is_finite(sum)) return false;
  if constexpr (kNorm == NormType::kL2 && !(sizeof(acc_t) == 8 && sizeof(scalar_t) < 8)) {
    return sum >= (sizeof(acc_t) == 4 ? 0x1p-100 : 0x1p-1000);
  }
  return true;
}

// Returns the power of two that scales `largest` into [1, 2) or close to it. Multiplying by a power
// of two does not round, and squares of scaled elements do not overflow, nor underflow where it
// would matter.
template <NormType kNorm>
AMPFUSE_HOST_DEVICE double norm_scale(double largest) {
  if constexpr (kNorm == NormType::kL2) {
    if (largest > 0 && is_finite(largest)) {
      const int exponent = std::ilogb(largest);
      // The scale must be a normal number: threads may flush subnormal numbers to zero.
      return std::ldexp(1.0, exponent < -1022 ? 1022 : exponent > 1022 ? -1022 : -exponent);
    }
  }
  return 1;
}

// Returns an element as a real number: a complex one as its magnitude.
template <typename acc_t, typename scalar_t>
AMPFUSE_HOST_DEVICE acc_t norm_value(scalar_t x) {
  return static_cast<acc_t>(x);
}
template <typename acc_t, typename T>
AMPFUSE_HOST_DEVICE acc_t norm_value(Complex<T> x) {
  return magnitude(x);
}

// Returns the NormPartial of a single element. The magnitude of a finite complex double can be
// infinite, so `nonfinite` is found from its components.
template <typename scalar_t>
AMPFUSE_HOST_DEVICE NormPartial norm_partial(scalar_t x) {
  const double value = norm_value<double>(x);
  return {std::fabs(value), is_finite(value) ? 0 : 1};
}
template <typename T>
AMPFUSE_HOST_DEVICE NormPartial norm_partial(Complex<T> x) {
  return {magnitude(x), is_finite(x) ? 0 : 1};
}

// A single thread as the `workers` of norm_exact and norm_of_partials. For warps and blocks there
// is a class with the same functions, TeamWorkers (cuda/reduce.cuh).
struct OneWorker {
  AMPFUSE_HOST_DEVICE int index() const { return 0; }
  AMPFUSE_HOST_DEVICE int count() const { return 1; }
  template <NormType kNorm>
  AMPFUSE_HOST_DEVICE double join(double x) const {
    return x;
  }
};

// Returns the norm of `count` partials, correct for every magnitude that a double can hold. It
// reads the partials twice, so it is used only for the rare sums outside norm_in_range.
template <NormType kNorm, typename Partial, typename Workers>
AMPFUSE_HOST_DEVICE NormPartial norm_exact(int64_t count, const Partial& partial,
                                           const Workers& workers) {
  if (count == 1) return partial(0);
  double largest = 0;
  double nonfinite = 0;
  for (int64_t i = workers.index(); i < count; i += workers.count()) {
    const NormPartial p = partial(i);
    if (p.norm > largest) largest = p.norm;  // skips NaN, which the sum below includes
    if (p.nonfinite) nonfinite = 1;
  }
  largest = workers.template join<NormType::kInf>(largest);
  nonfinite = workers.template join<NormType::kInf>(nonfinite);

  if (largest == 0 && nonfinite == 0) return {0, 0};

  const double scale = norm_scale<kNorm>(largest);
  double sum = 0;
  for (int64_t i = workers.index(); i < count; i += workers.count()) {
    sum = norm_accumulate<kNorm>(sum, partial(i).norm * scale);
  }
  sum = workers.template join<kNorm>(sum);
  return {norm_finish<kNorm>(sum) / scale, nonfinite != 0 ? 1 : 0};
}

// Returns the norm of `count` partials. One read is enough if the sum stays in range; otherwise
// norm_exact reads them again.
template <NormType kNorm, typename Partial, typename Workers>
AMPFUSE_HOST_DEVICE NormPartial norm_of_partials(int64_t count, const Partial& partial,
                                                 const Workers& workers) {
  if (count == 1) return partial(0);
  double sum = 0;
  double nonfinite = 0;
  // Unrolled, so that several loads are in flight before the first result is needed.
#if defined(__CUDA_ARCH__)
#pragma unroll 8
#endif
  for (int64_t i = workers.index(); i < count; i += workers.count()) {
    const NormPartial p = partial(i);
    sum = norm_accumulate<kNorm>(sum, p.norm);
    if (p.nonfinite) nonfinite = 1;
  }
  sum = workers.template join<kNorm>(sum);
  nonfinite = workers.template join<NormType::kInf>(nonfinite);
  if (norm_in_range<kNorm, double, double>(sum)) {
    return {norm_finish<kNorm>(sum), nonfinite != 0 ? 1 : 0};
  }
  return norm_exact<kNorm>(count, partial, workers);
}

}  // namespace ampfuse::math
