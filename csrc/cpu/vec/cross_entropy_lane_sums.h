// Moves numbers of a tile's rows between vector lanes and arrays of doubles.
#pragma once

#include "to_double.h"

namespace ampfuse::CPU_CAPABILITY {

template <typename A>
using VecOf = at::vec::Vectorized<A>;

/// Stores a vector as doubles, one per row; load_as() loads it again.
template <typename A>
void store_as_double(const VecOf<A>& x, double* to) {
  if constexpr (std::is_same_v<A, double>) {
    x.store(to);
  } else {
    const auto [low, high] = to_double(x);
    low.store(to);
    high.store(to + VecOf<double>::size());
  }
}
template <typename A>
VecOf<A> load_as(const double* from) {
  const auto low = VecOf<double>::loadu(from);
  if constexpr (std::is_same_v<A, double>) {
    return low;
  } else {
    return to_float(low, VecOf<double>::loadu(from + VecOf<double>::size()));
  }
}

/// One sum per lane, in double.
template <typename A>
class LaneSums {
 public:
  void add(const VecOf<A>& x) {
    if constexpr (std::is_same_v<A, double>) {
      low_ = low_ + x;
    } else {
      const auto [low, high] = to_double(x);
      low_ = low_ + low;
      high_ = high_ + high;
    }
  }

  void put(double* to, double factor) const {
    (low_ * VecOf<double>(factor)).store(to);
    if constexpr (!std::is_same_v<A, double>) {
      (high_ * VecOf<double>(factor)).store(to + VecOf<double>::size());
    }
  }

 private:
  VecOf<double> low_ = 0;
  VecOf<double> high_ = 0;
};

}  // namespace ampfuse::CPU_CAPABILITY
