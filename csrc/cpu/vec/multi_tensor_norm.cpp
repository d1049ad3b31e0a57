// The norm of a chunk. Elements are converted to double: the squares of types up to 32 bits then
// neither overflow nor are rounded. They are added in 32 lanes for any register width, so that all
// instruction sets give the same bits. Memory is the limit, not arithmetic: a core reads about 10
// GB/s, and can add doubles ten times as fast as they arrive.
#include "multi_tensor_norm.h"

#include <ATen/cpu/vec/functional.h>

#include <optional>
#include <tuple>

#include "../../math/multi_tensor_unscale.h"
#include "lane.h"
#include "scaled.h"
#include "to_double.h"

namespace ampfuse::CPU_CAPABILITY {

namespace {

using at::vec::Vectorized;
using math::NormType;
using Vec = at::vec::Vectorized<double>;

constexpr int kLanes = 32;
constexpr int kVectors = kLanes / Vec::size();
static_assert(kLanes % Vec::size() == 0);

// Access policy: reads elements unchanged.
struct AsItIs {};

// Access policy: multiplies each element, and stores the product before it enters the norm.
template <typename scalar_t>
struct Scaled {
  explicit Scaled(double factor) : factors(static_cast<factor_t<scalar_t>>(factor)) {}
  Vectorized<factor_t<scalar_t>> factors;
};
template <typename T>
struct Scaled<math::Complex<T>> {
  explicit Scaled(double factor) : factor(static_cast<T>(factor)) {}
  T factor;
};

// Returns the vector at `offset` of x[0, count), with zeros after the end.
template <typename scalar_t>
Vectorized<scalar_t> load_some(const scalar_t* x, int64_t count, int64_t offset, AsItIs) {
  using V = Vectorized<scalar_t>;
  const int64_t rest = count - offset;
  if (rest >= V::size()) return V::loadu(x + offset);
  return rest > 0 ? V::loadu(x + offset, rest) : V(scalar_t(0));
}
template <typename scalar_t>
Vectorized<scalar_t> load_some(scalar_t* x, int64_t count, int64_t offset,
                               const Scaled<scalar_t>& scaling) {
  using V = Vectorized<scalar_t>;
  const int64_t rest = count - offset;
  if (rest <= 0) return V(scalar_t(0));
  if (rest >= V::size()) {
    const V value = scaled(V::loadu(x + offset), scaling.factors);
    value.store(x + offset);
    return value;
  }
  scaled(V::loadu(x + offset, rest), scaling.factors).store(x + offset, rest);
  return V::loadu(x + offset, rest);  // zeros after the end: 0 · infinity would be NaN
}

// Loads up to kLanes elements as doubles. Missing ones become 0, which adds nothing to any norm.
template <typename scalar_t, typename Access>
void load(scalar_t* x, int64_t count, const Access& access, Vec (&out)[kVectors]) {
  const auto loaded = [&](int v) { return load_some(x, count, v * Vec::size(), access); };
  if constexpr (std::is_same_v<scalar_t, double>) {
    for (int v = 0; v < kVectors; ++v) out[v] = loaded(v);
  } else if constexpr (std::is_same_v<scalar_t, float>) {
    for (int v = 0; v < kVectors; v += 2) std::tie(out[v], out[v + 1]) = to_double(loaded(v));
  } else {
    for (int v = 0; v < kVectors; v += 4) {
      const auto [low, high] = at::vec::convert_to_float(loaded(v));
      std::tie(out[v], out[v + 1]) = to_double(low);
      std::tie(out[v + 2], out[v + 3]) = to_double(high);
    }
  }
}
template <typename T, typename Access>
void load(math::Complex<T>* x, int64_t count, const Access& access, Vec (&out)[kVectors]) {
  if constexpr (!std::is_same_v<Access, AsItIs>) {
    for (int64_t i = 0; i < count; ++i) x[i] = math::scaled<T>(x[i], access.factor);
  }
  double block[kLanes] = {};
  for (int64_t i = 0; i < count; ++i) block[i] = math::norm_value<double>(x[i]);
  for (int v = 0; v < kVectors; ++v) out[v] = Vec::loadu(block + v * Vec::size());
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

template <NormType kNorm, typename scalar_t, typename Access>
math::NormPartial norm_chunk(scalar_t* x, int64_t count, const Access& access) {
  Vec lanes[kVectors];
  Vec block[kVectors];
  for (Vec& lane : lanes) lane = Vec(0);
  for (int64_t i = 0; i < count; i += kLanes) {
    i + kLanes <= count ? load(x + i, kLanes, access, block)
                        : load(x + i, count - i, access, block);
    for (int v = 0; v < kVectors; ++v) {
      lanes[v] = math::norm_accumulate<kNorm>(lanes[v], block[v]);
    }
  }
  const double total = sum<kNorm>(lanes);
  if (math::norm_in_range<kNorm, scalar_t, double>(total))
    return {math::norm_finish<kNorm>(total), 0};
  return math::norm_exact<kNorm>(
      count, [x](int64_t i) { return math::norm_partial(x[i]); }, math::OneWorker());
}

template <NormType kNorm, typename scalar_t>
math::NormPartial norm_chunk(void* data, int64_t count, std::optional<double> factor) {
  auto* const x = static_cast<scalar_t*>(data);
  return factor ? norm_chunk<kNorm>(x, count, Scaled<scalar_t>(*factor))
                : norm_chunk<kNorm>(x, count, AsItIs());
}

template <NormType kNorm>
math::NormPartial norm_chunk(c10::ScalarType dtype, void* x, int64_t count,
                             std::optional<double> factor) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return norm_chunk<kNorm, c10::Half>(x, count, factor);
    case c10::ScalarType::BFloat16:
      return norm_chunk<kNorm, c10::BFloat16>(x, count, factor);
    case c10::ScalarType::Float:
      return norm_chunk<kNorm, float>(x, count, factor);
    case c10::ScalarType::Double:
      return norm_chunk<kNorm, double>(x, count, factor);
    case c10::ScalarType::ComplexFloat:
      return norm_chunk<kNorm, math::Complex<float>>(x, count, factor);
    default:
      return norm_chunk<kNorm, math::Complex<double>>(x, count, factor);
  }
}

math::NormPartial norm_chunk(NormType type, c10::ScalarType dtype, void* x, int64_t count,
                             std::optional<double> factor) {
  switch (type) {
    case NormType::kL1:
      return norm_chunk<NormType::kL1>(dtype, x, count, factor);
    case NormType::kL2:
      return norm_chunk<NormType::kL2>(dtype, x, count, factor);
    default:
      return norm_chunk<NormType::kInf>(dtype, x, count, factor);
  }
}

}  // namespace

math::NormPartial norm_chunk(NormType type, c10::ScalarType dtype, const void* x, int64_t count) {
  return norm_chunk(type, dtype, const_cast<void*>(x), count, std::nullopt);  // AsItIs only reads
}

math::NormPartial scale_norm_chunk(NormType type, c10::ScalarType dtype, void* x, int64_t count,
                                   double factor) {
  return norm_chunk(type, dtype, x, count, std::optional(factor));
}

}  // namespace ampfuse::CPU_CAPABILITY
