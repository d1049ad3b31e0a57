// From a tile's exponentials to its gradient.
#include "../../math/exponential.h"
#include "cross_entropy_tile.h"
#include "lane.h"
#include "lane_sums.h"
#include "tile_memory.h"
#include "tile_shares.h"

namespace ampfuse::CPU_CAPABILITY {

namespace {

// math::RowGradient of each row.
struct TileGradient {
  TileNumbers of_exponential, scale, of_target;

  TileGradient(const TileStatistics& statistics, const TileNumbers& reference,
               const TileNumbers& target_share, double z_loss, const TileNumbers& factor) {
    using Vec = VecOf<double>;
    for (int64_t row = 0; row < kTileRows; row += Vec::size()) {
      const auto at = [&](const TileNumbers& numbers) { return Vec::loadu(numbers + row); };
      const math::Statistics<Vec> known = {at(statistics.largest), at(statistics.sum),
                                           at(statistics.others), at(statistics.shares)};
      const math::RowGradient<Vec> gradient =
          math::row_gradient(known, at(reference), at(target_share), z_loss, at(factor));
      gradient.of_exponential.store(of_exponential + row);
      gradient.scale.store(scale + row);
      gradient.of_target.store(of_target + row);
    }
  }
};

// What the exponentials of some rows are multiplied by.
template <typename A>
struct Factors {
  A high[kTileRows];
  A low[kTileRows];
  A unbias[kTileRows];

  explicit Factors(const TileNumbers& factors) {
    for (int64_t row = 0; row < kTileRows; ++row) {
      if constexpr (std::is_same_v<A, double>) {
        high[row] = factors[row];
      } else {
        const math::BiasedFactor factor = math::biased_factor(factors[row]);
        high[row] = factor.high;
        low[row] = factor.low;
        unbias[row] = factor.unbias;
      }
    }
  }
};

// In place of exponentials.
template <typename scalar_t>
void write_products(const Tile& tile, const TileMemory<acc_t<scalar_t>>& memory,
                    const TileGradient& gradient) {
  using A = acc_t<scalar_t>;
  using Vec = VecOf<A>;
  const Factors<A> factors(gradient.of_exponential);
  const TileShareVectors<A> shares(tile, memory.probabilities);
  for (int64_t row = 0; row < kTileRows; row += Vec::size()) {
    math::BiasedFactorOf<Vec> factor = {Vec::loadu(factors.high + row), Vec(0), Vec(1)};
    if constexpr (!std::is_same_v<A, double>) {
      factor.low = Vec::loadu(factors.low + row);
      factor.unbias = Vec::loadu(factors.unbias + row);
    }
    const Vec minus_scale = load_as<A>(gradient.scale + row).neg();
    for (int64_t c = 0; c < tile.classes; ++c) {
      const int64_t i = c * kTileRows + row;
      const Vec e = Vec::loadu(memory.exponentials + i);
      Vec g;
      if constexpr (std::is_same_v<scalar_t, float>) {
        g = factor.times(math::InTwo<Vec>{e, Vec::loadu(memory.lows + i)});
      } else {
        g = factor.times(e);
      }
      if (tile.shares.any()) {
        g = math::Lane<Vec>::multiply_add(minus_scale, shares.at(c, row), g);
      }
      if (tile.softcap != 0) g = g * Vec::loadu(memory.slopes + i);
      g.store(memory.exponentials + i);
    }
  }
}

template <typename scalar_t>
void write_targets(const Tile& tile, const TileMemory<acc_t<scalar_t>>& memory,
                   const TileGradient& gradient) {
  using A = acc_t<scalar_t>;
  for (int64_t row = 0; row < tile.rows; ++row) {
    if (tile.targets[row] < 0) {
      for (int64_t c = 0; c < tile.classes; ++c) memory.exponentials[c * kTileRows + row] = 0;
      continue;
    }
    const int64_t at = tile.targets[row] * kTileRows + row;
    const double x = raw_logit<scalar_t>(tile, row, tile.targets[row]);
    const double slope = tile.softcap == 0 ? 1 : math::softcap_slope(x, tile.softcap);
    memory.exponentials[at] = static_cast<A>(gradient.of_target[row] * slope);
  }
}

}  // namespace

void tile_gradient(const Tile& tile, void* bytes, const TileStatistics& statistics,
                   const TileNumbers& reference, const TileNumbers& target_share, double z_loss,
                   const TileNumbers& scale, void* out, TileLayout layout) {
  const TileGradient gradient(statistics, reference, target_share, z_loss, scale);
  with_logit_type(tile.dtype, [&]<typename scalar_t>() {
    const TileMemory<acc_t<scalar_t>> memory(tile, bytes);
    write_products<scalar_t>(tile, memory, gradient);
    if (tile.has_targets()) write_targets<scalar_t>(tile, memory, gradient);
    store_tile<scalar_t>(memory.exponentials, tile.rows, tile.classes, memory.moving, out, layout);
  });
}

}  // namespace ampfuse::CPU_CAPABILITY
