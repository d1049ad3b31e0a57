// The norm of a chunk: elements become doubles, whose squares cannot overflow and round nothing for
// types of 32 bits and less, and are added up in 32 lanes whatever the width of a register, so that
// all instruction sets give the same bits. Memory is the limit, not the arithmetic: a core reads
// some 10 GB/s and adds ten times as many doubles as that brings.
#include "multi_tensor_norm.h"

#include <ATen/cpu/vec/functional.h>

#include <algorithm>
#include <tuple>

#include "lane.h"
#include "scaled.h"
#include "to_double.h"

namespace ampfuse::CPU_CAPABILITY {

namespace {

using math::NormType;
using Vec = at::vec::Vectorized<double>;

constexpr int kLanes = 32;
constexpr int kVectors = kLanes / Vec::size();
static_assert(kLanes % Vec::size() == 0);

// The vector at `offset` of x[0, count), zeros behind the end.
template <typename V, typename scalar_t>
V load_some(const scalar_t* x, int64_t count, int64_t offset) {
  const int64_t rest = count - offset;
  if (rest >= V::size()) return V::loadu(x + offset);
  return rest > 0 ? V::loadu(x + offset, rest) : V(scalar_t(0));
}

// Up to kLanes elements as doubles; what is missing becomes 0, which adds nothing to any norm.
template <typename scalar_t>
void load(const scalar_t* x, int64_t count, Vec (&out)[kVectors]) {
  using Narrow = at::vec::Vectorized<scalar_t>;
  if constexpr (std::is_same_v<scalar_t, double>) {
    for (int v = 0; v < kVectors; ++v) out[v] = load_some<Vec>(x, count, v * Vec::size());
  } else if constexpr (std::is_same_v<scalar_t, float>) {
    for (int v = 0; v < kVectors; v += 2) {
      std::tie(out[v], out[v + 1]) = to_double(load_some<Narrow>(x, count, v * Vec::size()));
    }
  } else if constexpr (at::vec::is_reduced_floating_point_v<scalar_t>) {
    for (int v = 0; v < kVectors; v += 4) {
      const auto [low, high] =
          at::vec::convert_to_float(load_some<Narrow>(x, count, v * Vec::size()));
      std::tie(out[v], out[v + 1]) = to_double(low);
      std::tie(out[v + 2], out[v + 3]) = to_double(high);
    }
  } else {
    double block[kLanes] = {};
    for (int64_t i = 0; i < count; ++i) block[i] = math::norm_value<double>(x[i]);
    for (int v = 0; v < kVectors; ++v) out[v] = Vec::loadu(block + v * Vec::size());
  }
}

template <NormType kNorm>
double sum(const Vec (&lanes)[kVectors]) {
  double sums[kLanes];
  for (int v = 0; v < kVectors; ++v) lanes[v].store(sums + v * Vec::size());
  for (int width = kLanes / 2; width > 0; width /= 2) {
    for (int l = 0; l < width; ++l) sums[l] = math::norm_join<kNorm>(sums[l], sums[l + width]);
  }
  return sums[0];
}

// With kScale of what is left after scaling in place, lanes by lanes: while these are computed
// with, memory brings the next.
template <bool kScale, NormType kNorm, typename scalar_t>
math::NormPartial norm_chunk(scalar_t* x, int64_t count, double factor) {
  Vec lanes[kVectors];
  Vec block[kVectors];
  for (Vec& lane : lanes) lane = Vec(0);
  for (int64_t i = 0; i < count; i += kLanes) {
    const int64_t lanes_left = std::min<int64_t>(kLanes, count - i);
    if constexpr (kScale) scale(x + i, lanes_left, factor);
    i + kLanes <= count ? load(x + i, kLanes, block) : load(x + i, lanes_left, block);
    for (int v = 0; v < kVectors; ++v) {
      lanes[v] = math::norm_accumulate<kNorm>(lanes[v], block[v]);
    }
  }
  const double total = sum<kNorm>(lanes);
  if (math::norm_in_range<kNorm, scalar_t, double>(total))
    return {math::norm_finish<kNorm>(total), 0};
  return math::norm_exact<kNorm>(
      count, [x](int64_t i) { return math::norm_part(x[i]); }, math::OneWorker());
}

template <bool kScale, NormType kNorm>
math::NormPartial norm_chunk(c10::ScalarType dtype, void* x, int64_t count, double factor) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return norm_chunk<kScale, kNorm>(static_cast<c10::Half*>(x), count, factor);
    case c10::ScalarType::BFloat16:
      return norm_chunk<kScale, kNorm>(static_cast<c10::BFloat16*>(x), count, factor);
    case c10::ScalarType::Float:
      return norm_chunk<kScale, kNorm>(static_cast<float*>(x), count, factor);
    case c10::ScalarType::Double:
      return norm_chunk<kScale, kNorm>(static_cast<double*>(x), count, factor);
    case c10::ScalarType::ComplexFloat:
      return norm_chunk<kScale, kNorm>(static_cast<math::Complex<float>*>(x), count, factor);
    default:
      return norm_chunk<kScale, kNorm>(static_cast<math::Complex<double>*>(x), count, factor);
  }
}

template <bool kScale>
math::NormPartial norm_chunk(NormType type, c10::ScalarType dtype, void* x, int64_t count,
                             double factor) {
  switch (type) {
    case NormType::kL1:
      return norm_chunk<kScale, NormType::kL1>(dtype, x, count, factor);
    case NormType::kL2:
      return norm_chunk<kScale, NormType::kL2>(dtype, x, count, factor);
    default:
      return norm_chunk<kScale, NormType::kInf>(dtype, x, count, factor);
  }
}

}  // namespace

math::NormPartial norm_chunk(NormType type, c10::ScalarType dtype, const void* x, int64_t count) {
  return norm_chunk<false>(type, dtype, const_cast<void*>(x), count, 1);
}

math::NormPartial scale_norm_chunk(NormType type, c10::ScalarType dtype, void* x, int64_t count,
                                   double factor) {
  return norm_chunk<true>(type, dtype, x, count, factor);
}

}  // namespace ampfuse::CPU_CAPABILITY
