// Vector registers as lanes of the formulae under math/.
#pragma once

#include <ATen/cpu/vec/vec.h>

#include "../../math/lane.h"

namespace ampfuse::math {

template <typename T>
struct Lane<at::vec::Vectorized<T>> {
  using V = at::vec::Vectorized<T>;
  static AMPFUSE_HOST_DEVICE V abs(const V& x) { return x.abs(); }
  static AMPFUSE_HOST_DEVICE V sqrt(const V& x) { return x.sqrt(); }
  static AMPFUSE_HOST_DEVICE V multiply_add(const V& a, const V& b, const V& c) {
    return at::vec::fmadd(a, b, c);
  }
  static AMPFUSE_HOST_DEVICE V larger(const V& a, const V& b) { return at::vec::maximum(a, b); }
};

}  // namespace ampfuse::math
