// Exponentials of a tile's logits, each row's relative to its own reference.
#pragma once

#include "../../math/exponential.h"
#include "lane.h"
#include "lane_sums.h"
#include "tile_memory.h"

namespace ampfuse::CPU_CAPABILITY {

/// What exponentials of rows are relative to, where they have a largest z.
template <typename A>
struct References {
  A shift[kTileRows];
  A rounder[kTileRows];
  A floor[kTileRows];

  References(const TileNumbers& largest, TileNumbers& value) {
    for (int64_t row = 0; row < kTileRows; ++row) {
      const A at = math::is_finite(largest[row]) ? static_cast<A>(largest[row]) : A(0);
      if constexpr (std::is_same_v<A, double>) {
        shift[row] = value[row] = at;
      } else {
        const math::ExpReference reference = math::exp_reference(at);
        shift[row] = reference.shift;
        rounder[row] = reference.rounder;
        floor[row] = reference.floor;
        value[row] = reference.value();
      }
    }
  }
};

/// Exponentials in place of z; visit(vector of the pair, z, exponential, what that lacks) sees
/// them.
template <typename scalar_t, typename Visit>
void exponentials_of_pair(const TileMemory<acc_t<scalar_t>>& memory, int64_t classes,
                          const References<acc_t<scalar_t>>& references, int64_t row,
                          const Visit& visit) {
  using A = acc_t<scalar_t>;
  using Vec = VecOf<A>;
  math::ExpReferenceOf<Vec> reference[kPair];
  for (int k = 0; k < kPair; ++k) {
    const int64_t i = row + k * Vec::size();
    reference[k].shift = Vec::loadu(references.shift + i);
    if constexpr (std::is_same_v<A, double>) continue;
    reference[k].rounder = Vec::loadu(references.rounder + i);
    reference[k].floor = Vec::loadu(references.floor + i);
  }
  for (int64_t c = 0; c < classes; ++c) {
#pragma GCC unroll 2
    for (int k = 0; k < kPair; ++k) {
      const int64_t i = c * kTileRows + row + k * Vec::size();
      const Vec z = Vec::loadu(memory.exponentials + i);
      if constexpr (std::is_same_v<scalar_t, double>) {
        const Vec e = (z - reference[k].shift).exp();
        e.store(memory.exponentials + i);
        visit(k, z, e, Vec(0));
      } else if constexpr (std::is_same_v<scalar_t, float>) {
        const auto [high, low] = math::biased_exp_in_two(z, reference[k]);
        high.store(memory.exponentials + i);
        low.store(memory.lows + i);
        visit(k, z, high, low);
      } else {
        const Vec e = math::biased_exp(z, reference[k]);
        e.store(memory.exponentials + i);
        visit(k, z, e, Vec(0));
      }
    }
  }
}

}  // namespace ampfuse::CPU_CAPABILITY
