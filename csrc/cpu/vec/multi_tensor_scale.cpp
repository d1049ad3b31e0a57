#include "multi_tensor_scale.h"

#include <ATen/cpu/vec/functional.h>

#include <algorithm>

#include "../../math/multi_tensor_unscale.h"

namespace ampfuse::CPU_CAPABILITY {

namespace {

using at::vec::Vectorized;

template <typename acc_t>
bool is_zero(const Vectorized<acc_t>& mark) {
  acc_t lanes[Vectorized<acc_t>::size()];
  mark.store(lanes);
  return std::all_of(std::begin(lanes), std::end(lanes), [](acc_t lane) { return lane == 0; });
}

template <bool kWrite, typename scalar_t>
bool scale_wide(scalar_t* x, int64_t count, scalar_t factor) {
  using Vec = Vectorized<scalar_t>;
  const Vec factors(factor);
  Vec mark(0);
  for (int64_t i = 0; i < count; i += Vec::size()) {
    const int64_t rest = std::min<int64_t>(Vec::size(), count - i);
    Vec value = Vec::loadu(x + i, rest);
    if constexpr (kWrite) {
      value = value * factors;
      value.store(x + i, rest);
    }
    mark = math::mark_nonfinite(mark, value);
  }
  return is_zero(mark);
}

// 16-bit types: the product is rounded once, and it is the rounded value that must be finite.
template <bool kWrite, typename scalar_t>
bool scale_narrow(scalar_t* x, int64_t count, float factor) {
  using Vec = Vectorized<scalar_t>;
  const Vectorized<float> factors(factor);
  Vectorized<float> mark(0);
  for (int64_t i = 0; i < count; i += Vec::size()) {
    const int64_t rest = std::min<int64_t>(Vec::size(), count - i);
    Vec value = Vec::loadu(x + i, rest);
    if constexpr (kWrite) {
      const auto [low, high] = at::vec::convert_to_float(value);
      value = at::vec::convert_from_float<scalar_t>(low * factors, high * factors);
      value.store(x + i, rest);
    }
    const auto [low, high] = at::vec::convert_to_float(value);
    mark = math::mark_nonfinite(math::mark_nonfinite(mark, low), high);
  }
  return is_zero(mark);
}

template <typename scalar_t>
bool scale_chunk(scalar_t* x, int64_t count, double factor) {
  if constexpr (at::vec::is_reduced_floating_point_v<scalar_t>) {
    const float narrow = static_cast<float>(factor);
    return narrow == 1 ? scale_narrow<false>(x, count, narrow)
                       : scale_narrow<true>(x, count, narrow);
  } else {
    const scalar_t wide = static_cast<scalar_t>(factor);
    return wide == 1 ? scale_wide<false>(x, count, wide) : scale_wide<true>(x, count, wide);
  }
}

}  // namespace

bool scale_chunk(c10::ScalarType dtype, void* x, int64_t count, double factor) {
  switch (dtype) {
    case c10::ScalarType::Half:
      return scale_chunk(static_cast<c10::Half*>(x), count, factor);
    case c10::ScalarType::BFloat16:
      return scale_chunk(static_cast<c10::BFloat16*>(x), count, factor);
    case c10::ScalarType::Float:
      return scale_chunk(static_cast<float*>(x), count, factor);
    default:
      return scale_chunk(static_cast<double*>(x), count, factor);
  }
}

}  // namespace ampfuse::CPU_CAPABILITY
