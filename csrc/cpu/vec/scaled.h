// Products with one factor, as math/multi_tensor_unscale.h defines them.
#pragma once

#include <ATen/cpu/vec/functional.h>

#include <type_traits>

namespace ampfuse::CPU_CAPABILITY {

/// The type in which a product is computed.
template <typename scalar_t>
using factor_t =
    std::conditional_t<at::vec::is_reduced_floating_point_v<scalar_t>, float, scalar_t>;

/// Returns x · factor, computed in factor_t and then rounded to scalar_t.
template <typename scalar_t>
at::vec::Vectorized<scalar_t> scaled(const at::vec::Vectorized<scalar_t>& x,
                                     const at::vec::Vectorized<factor_t<scalar_t>>& factor) {
  if constexpr (at::vec::is_reduced_floating_point_v<scalar_t>) {
    const auto [low, high] = at::vec::convert_to_float(x);
    return at::vec::convert_from_float<scalar_t>(low * factor, high * factor);
  } else {
    return x * factor;
  }
}

}  // namespace ampfuse::CPU_CAPABILITY
