// Computes the gradient of a tile from its exponentials.
#include "../../math/cross_entropy_exponential.h"
#include "cross_entropy_lane_sums.h"
#include "cross_entropy_tile.h"
#include "cross_entropy_tile_class_masses.h"
#include "cross_entropy_tile_memory.h"
#include "lane.h"

namespace ampfuse::CPU_CAPABILITY {

namespace {

// The math::RowGradient of each row.
struct TileGradient {
  TileNumbers of_exponential, scale, of_target;

  TileGradient(const Tile& tile, const TileStatistics& statistics, const TileNumbers& reference,
               const TileTargets& targets, const TileNumbers& factor) {
    using Vec = VecOf<double>;
    for (int64_t row = 0; row < tile.lanes(); row += Vec::size()) {
      const auto at = [&](const TileNumbers& numbers) { return Vec::loadu(numbers + row); };
      const math::Statistics<Vec> known = {at(statistics.largest), at(statistics.sum),
                                           at(statistics.others), at(statistics.masses)};
      math::RowGradient<Vec> gradient =
          math::row_gradient(known, at(reference), at(targets.mass), tile.terms, at(factor));
      if (tile.terms.softcap != 0) {
        gradient.of_target =
            gradient.of_target * math::softcap_slope(at(targets.logit), tile.terms.softcap);
      }
      gradient.of_exponential.store(of_exponential + row);
      gradient.scale.store(scale + row);
      gradient.of_target.store(of_target + row);
    }
  }
};

// Returns math::biased_factor of a vector of rows, or for double the plain factor: exponentials of
// double logits have no bias.
template <typename A>
math::BiasedFactorOf<VecOf<A>> factor_of_rows(const double* factors) {
  using Vec = VecOf<A>;
  if constexpr (std::is_same_v<A, double>) {
    return {Vec::loadu(factors), Vec(0), Vec(1)};
  } else {
    using Wide = VecOf<double>;
    using L = math::Lane<Wide>;
    Wide with_bias[2];
    Wide unbias[2];
    for (int k = 0; k < 2; ++k) {
      const Wide factor = Wide::loadu(factors + k * Wide::size());
      const Wide is_apart = factor.abs() < Wide(math::kSmallestUnbiased);
      with_bias[k] = L::choose(is_apart, factor, factor * Wide(math::kUnbias));
      unbias[k] = L::choose(is_apart, Wide(math::kUnbias), Wide(1));
    }
    const Vec high = to_float(with_bias[0], with_bias[1]);
    const auto [first, second] = to_double(high);
    const auto finite = [](const Wide& x) { return L::choose(x - x == Wide(0), x, Wide(0)); };
    const Vec low = to_float(finite(with_bias[0] - first), finite(with_bias[1] - second));
    return {high, low, to_float(unbias[0], unbias[1])};
  }
}

// The gradients of a vector of rows.
template <typename scalar_t>
class RowGradients {
 public:
  using A = acc_t<scalar_t>;
  using Vec = VecOf<A>;

  RowGradients(const Tile& tile, const TileMemory<A>& memory, const TileTargets& targets,
               const TileGradient& gradient, int64_t row)
      : memory_(memory),
        row_(row),
        has_masses_(tile.masses.any()),
        is_capped_(tile.terms.softcap != 0),
        masses_(tile, memory.probabilities),
        factor_(factor_of_rows<A>(gradient.of_exponential + row)),
        minus_scale_(load_as<A>(gradient.scale + row).neg()),
        target_(load_as<A>(targets.index + row)),
        of_target_(load_as<A>(gradient.of_target + row)) {}

  Vec at(int64_t c) const {
    using L = math::Lane<Vec>;
    const int64_t i = c * kTileRows + row_;
    const Vec e = Vec::loadu(memory_.exponentials + i);
    Vec g;
    if constexpr (std::is_same_v<scalar_t, float>) {
      g = factor_.times(math::InTwo<Vec>{e, Vec::loadu(memory_.lows + i)});
    } else {
      g = factor_.times(e);
    }
    if (has_masses_) g = L::multiply_add(minus_scale_, masses_.at(c, row_), g);
    if (is_capped_) g = g * Vec::loadu(memory_.slopes + i);
    g = L::choose_equal(target_, Vec(static_cast<A>(c)), of_target_, g);
    return L::choose_equal(target_, Vec(static_cast<A>(kIgnored)), Vec(0), g);
  }

 private:
  TileMemory<A> memory_;
  int64_t row_;
  bool has_masses_;
  bool is_capped_;
  TileClassMassVectors<A> masses_;
  math::BiasedFactorOf<Vec> factor_;
  Vec minus_scale_;
  Vec target_;
  Vec of_target_;
};

// Writes vectors of rows to to[c * stride + row]. They may overwrite the exponentials.
template <typename scalar_t, typename To>
void write_gradient(const Tile& tile, const TileMemory<acc_t<scalar_t>>& memory,
                    const TileTargets& targets, const TileGradient& gradient, To* to,
                    int64_t stride) {
  using Out = at::vec::Vectorized<To>;
  for (int64_t row = 0; row < tile.lanes(); row += Out::size()) {
    const auto put = [&](const Out& some, int64_t c) {
      To* const here = to + c * stride + row;
      __builtin_prefetch(here + kTileRows, /*rw=*/1);  // like prefetch_next(), for writing
      some.store(here);
    };
    const RowGradients<scalar_t> low(tile, memory, targets, gradient, row);
    if constexpr (kIs16Bit<To>) {
      const RowGradients<scalar_t> high(tile, memory, targets, gradient, row + Out::size() / 2);
      for (int64_t c = 0; c < tile.classes; ++c) {
        put(at::vec::convert_from_float<To>(low.at(c), high.at(c)), c);
      }
    } else {
      for (int64_t c = 0; c < tile.classes; ++c) put(low.at(c), c);
    }
  }
}

}  // namespace

void tile_gradient(const Tile& tile, void* bytes, const TileStatistics& statistics,
                   const TileNumbers& reference, const TileTargets& targets,
                   const TileNumbers& scale, void* out, c10::ScalarType out_dtype,
                   TileLayout layout) {
  const TileGradient gradient(tile, statistics, reference, targets, scale);
  with_logit_type(tile.dtype, [&]<typename scalar_t>() {
    const TileMemory<acc_t<scalar_t>> memory(tile, bytes);
    const auto write = [&](auto* to, int64_t stride) {
      write_gradient<scalar_t>(tile, memory, targets, gradient, to, stride);
    };
    if (!layout.by_row && tile.rows == kTileRows && out_dtype == tile.dtype) {
      return write(static_cast<scalar_t*>(out), layout.stride);
    }
    write(memory.exponentials, kTileRows);
    with_gradient_type<scalar_t>(out_dtype, [&]<typename out_t>() {
      store_tile<out_t>(memory.exponentials, tile.rows, tile.classes, memory.moving, out, layout);
    });
  });
}

}  // namespace ampfuse::CPU_CAPABILITY
