#pragma once

#include <cmath>

#include "lane.h"

namespace ampfuse::math {

// Complex number with the memory layout of c10::complex<T>, without torch.
template <typename T>
struct alignas(2 * sizeof(T)) Complex {
  T re;
  T im;
};

// Returns |z| in double. The squares of complex64 components neither overflow nor underflow in
// double; for complex128, hypot scales its arguments itself.
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
