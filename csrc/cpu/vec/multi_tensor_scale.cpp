#include "multi_tensor_scale.h"

#include <ATen/cpu/vec/functional.h>

#include <algorithm>

#include "../../math/multi_tensor_unscale.h"
#include "scaled.h"

namespace ampfuse::CPU_CAPABILITY {

namespace {

using at::vec::Vectorized;

template <typename acc_t>
bool is_zero(const Vectorized<acc_t>& mark) {
  acc_t lanes[Vectorized<acc_t>::size()];
  mark.store(lanes);
  return std::all_of(std::begin(lanes), std::end(lanes), [](acc_t lane) { return lane == 0; });
}

// Adds a vector of values to the mark. 16-bit values are widened to two vectors.
template <typename scalar_t>
auto mark_nonfinite(const Vectorized<factor_t<scalar_t>>& mark, const Vectorized<scalar_t>& value) {
  if constexpr (at::vec::is_reduced_floating_point_v<scalar_t>) {
    const auto [low, high] = at::vec::convert_to_float(value);
    return math::mark_nonfinite(math::mark_nonfinite(mark, low), high);
  } else {
    return math::mark_nonfinite(mark, value);
  }
}

template <bool kWrite, typename scalar_t>
bool scale_chunk(scalar_t* x, int64_t count, factor_t<scalar_t> factor) {
  using Vec = Vectorized<scalar_t>;
  const Vectorized<factor_t<scalar_t>> factors(factor);
  Vectorized<factor_t<scalar_t>> mark(0);
  for (int64_t i = 0; i < count; i += Vec::size()) {
    const int64_t rest = std::min<int64_t>(Vec::size(), count - i);
    Vec value = Vec::loadu(x + i, rest);
    if constexpr (kWrite) {
      value = scaled(value, factors);
      value.store(x + i, rest);
    }
    mark = mark_nonfinite(mark, value);
  }
  return is_zero(mark);
}

template <typename scalar_t>
bool scale_chunk(scalar_t* x, int64_t count, double factor) {
  const auto rounded = static_cast<factor_t<scalar_t>>(factor);
  return rounded == 1 ? scale_chunk<false>(x, count, rounded)
                      : scale_chunk<true>(x, count, rounded);
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
