// Numbers of a tile's rows, in lanes and in arrays.
#pragma once

#include "cross_entropy_tile.h"
#include "logits.h"
#include "to_double.h"

namespace ampfuse::CPU_CAPABILITY {

template <typename A>
using VecOf = at::vec::Vectorized<A>;

/// Calls visit(first row) for pairs of vectors of rows.
template <typename A, typename Visit>
void each_row_pair(const Visit& visit) {
  static_assert(kTileRows % (kPair * VecOf<A>::size()) == 0);
  for (int64_t row = 0; row < kTileRows; row += kPair * VecOf<A>::size()) visit(row);
}

/// A sum in each lane, in double.
template <typename A>
class LaneSums {
 public:
  void add(const VecOf<A>& x) {
    if constexpr (std::is_same_v<A, double>) {
      sums_[0] = sums_[0] + x;
    } else {
      const auto [low, high] = to_double(x);
      sums_[0] = sums_[0] + low;
      sums_[1] = sums_[1] + high;
    }
  }

  void put(double* to, double factor) const {
    constexpr int64_t kSize = VecOf<double>::size();
    for (int64_t i = 0; i < VecOf<A>::size() / kSize; ++i) {
      (sums_[i] * VecOf<double>(factor)).store(to + i * kSize);
    }
  }

 private:
  VecOf<double> sums_[2] = {};
};

template <typename A>
void put_each(const VecOf<A>& x, double* to) {
  LaneSums<A> sums;
  sums.add(x);
  sums.put(to, 1);
}

template <typename A, typename Number>
VecOf<A> load_as(const Number* from) {
  A numbers[VecOf<A>::size()];
  for (int64_t i = 0; i < VecOf<A>::size(); ++i) numbers[i] = static_cast<A>(from[i]);
  return VecOf<A>::loadu(numbers);
}

}  // namespace ampfuse::CPU_CAPABILITY
