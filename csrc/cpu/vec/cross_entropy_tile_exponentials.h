// Exponentials of a tile's logits, each row's relative to its own reference.
#pragma once

#include "../../math/cross_entropy_exponential.h"
#include "cross_entropy_lane_sums.h"
#include "cross_entropy_tile_memory.h"
#include "lane.h"

namespace ampfuse::CPU_CAPABILITY {

/// Returns the references of the exponentials of a vector of rows from `row` on, and stores their
/// values in `value`. The reference is 0 for rows whose largest z is not finite.
template <typename A>
math::ExpReferenceOf<VecOf<A>> reference_of_rows(const TileNumbers& largest, int64_t row,
                                                 TileNumbers& value) {
  using Vec = VecOf<A>;
  const Vec top = load_as<A>(largest + row);
  const Vec at = math::Lane<Vec>::choose(top - top == Vec(0), top, Vec(0));
  if constexpr (std::is_same_v<A, double>) {
    at.store(value + row);
    return {at, at, at};
  } else {
    using Wide = VecOf<double>;
    const math::ExpReferenceOf<Vec> reference = math::exp_reference(at);
    const auto [low, high] = to_double(reference.powers());
    const auto [low_shift, high_shift] = to_double(reference.shift);
    (low_shift + low * Wide(math::kLog2)).store(value + row);
    (high_shift + high * Wide(math::kLog2)).store(value + row + Wide::size());
    return reference;
  }
}

/// Replaces z by exponentials for a vector of rows, with 0 for their targets. Calls visit(z,
/// exponential, low part of the exponential) for each class.
template <typename scalar_t, typename Visit>
void write_exponentials(const TileMemory<acc_t<scalar_t>>& memory, int64_t classes,
                        const math::ExpReferenceOf<AccVec<scalar_t>>& reference,
                        const TileTargets& targets, int64_t row, const Visit& visit) {
  using A = acc_t<scalar_t>;
  using Vec = VecOf<A>;
  const Vec target = load_as<A>(targets.index + row);
  for (int64_t c = 0; c < classes; ++c) {
    const int64_t i = c * kTileRows + row;
    const Vec z = math::Lane<Vec>::choose_equal(target, Vec(static_cast<A>(c)), Vec(-kInfinity<A>),
                                                Vec::loadu(memory.exponentials + i));
    if constexpr (std::is_same_v<scalar_t, double>) {
      const Vec e = (z - reference.shift).exp();
      e.store(memory.exponentials + i);
      visit(z, e, Vec(0));
    } else if constexpr (std::is_same_v<scalar_t, float>) {
      const auto [high, low] = math::biased_exp_in_two(z, reference);
      high.store(memory.exponentials + i);
      low.store(memory.lows + i);
      visit(z, high, low);
    } else {
      const Vec e = math::biased_exp(z, reference);
      e.store(memory.exponentials + i);
      visit(z, e, Vec(0));
    }
  }
}

}  // namespace ampfuse::CPU_CAPABILITY
