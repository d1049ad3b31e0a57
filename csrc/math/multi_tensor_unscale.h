#pragma once

#include "complex.h"
#include "host_device.h"

namespace ampfuse::math {

// x · factor, computed in acc_t and rounded once.
template <typename acc_t, typename scalar_t>
AMPFUSE_HOST_DEVICE scalar_t scaled(scalar_t x, acc_t factor) {
  return static_cast<scalar_t>(static_cast<acc_t>(x) * factor);
}
template <typename acc_t, typename T>
AMPFUSE_HOST_DEVICE Complex<T> scaled(Complex<T> x, acc_t factor) {
  return {scaled(x.re, factor), scaled(x.im, factor)};
}

// mark + x·0 stays 0 exactly as long as every x is finite; one NaN or infinity makes it NaN for
// good. Cheaper than a test per element, and the same for one number and a vector register.
template <typename V>
AMPFUSE_HOST_DEVICE V mark_nonfinite(V mark, V x) {
  return mark + x * V(0);
}

}  // namespace ampfuse::math
