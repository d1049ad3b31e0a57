#pragma once

#include <cmath>

#include "lane.h"

namespace ampfuse::math {

// The memory layout of c10::complex<T>, without torch.
template <typename T>
struct alignas(2 * sizeof(T)) Complex {
  T re;
  T im;
};

// |z| in double: for complex64 the squares can neither overflow nor underflow there, for
// complex128 hypot scales by itself.
AMPFUSE_HOST_DEVICE double magnitude(Complex<float> z) {
  return std::sqrt(double(z.re) * z.re + double(z.im) * z.im);
}
AMPFUSE_HOST_DEVICE double magnitude(Complex<double> z) {
  return std::hypot(z.re, z.im);
}

template <typename T>
AMPFUSE_HOST_DEVICE bool is_finite(Complex<T> z) {
  return is_finite(z.re) && is_finite(z.im);
}

}  // namespace ampfuse::math
