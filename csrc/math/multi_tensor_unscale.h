#pragma once

#include "complex.h"
#include "host_device.h"

namespace ampfuse::math {

// Returns x · factor, computed in acc_t and then rounded to scalar_t.
template <typename acc_t, typename scalar_t>
AMPFUSE_HOST_DEVICE scalar_t scaled(scalar_t x, acc_t factor) {
  return static_cast<scalar_t>(static_cast<acc_t>(x) * factor);
}
template <typename acc_t, typename T>
AMPFUSE_HOST_DEVICE Complex<T> scaled(Complex<T> x, acc_t factor) {
  return {scaled(x.re, factor), scaled(x.im, factor)};
}

// Returns mark + x·0. The mark stays 0 while every x is finite, and one NaN or infinity makes it
// NaN permanently. This is cheaper than a test per element, and works for a single number and for a
// vector register.
template <typename V>
AMPFUSE_HOST_DEVICE V mark_nonfinite(V mark, V x) {
  return mark + x * V(0);
}

}  // namespace ampfuse::math
