// Tiles of rows: what their logits tell. All loops go over classes, for two vectors of rows at a
// time; lanes know nothing of each other, so that no row's result depends on those beside it.
#include "cross_entropy_tile.h"

#include "lane.h"
#include "lane_sums.h"
#include "tile_exponentials.h"
#include "tile_memory.h"
#include "tile_shares.h"

namespace ampfuse::CPU_CAPABILITY {

namespace {

// The classes of the first largest logits; a NaN is larger than all numbers, as in torch.
template <typename A>
void find_first_largest(const A* x, int64_t classes, int64_t* argmax) {
  using Vec = VecOf<A>;
  for (int64_t row = 0; row < kTileRows; row += Vec::size()) {
    Vec best(-kInfinity<A>);
    Vec at(A(0));
    for (int64_t c = 0; c < classes; ++c) {
      const Vec here = Vec::loadu(x + c * kTileRows + row);
      const Vec is_above = (here > best) | ((here != here) & (best == best));
      best = Vec::blendv(best, here, is_above);
      at = Vec::blendv(at, Vec(static_cast<A>(c)), is_above);
    }
    A numbers[Vec::size()];
    at.store(numbers);
    for (int64_t i = 0; i < Vec::size(); ++i) argmax[row + i] = static_cast<int64_t>(numbers[i]);
  }
}

// A NaN may hide here; it shows in the sums.
template <typename A>
void find_largest(const A* x, int64_t classes, double softcap, TileNumbers& largest) {
  using Vec = VecOf<A>;
  each_row_pair<A>([&](int64_t row) {
    Vec found[kPair] = {Vec(-kInfinity<A>), Vec(-kInfinity<A>)};
    for (int64_t c = 0; c < classes; ++c) {
#pragma GCC unroll 2
      for (int k = 0; k < kPair; ++k) {
        found[k] =
            at::vec::clamp_min(Vec::loadu(x + c * kTileRows + row + k * Vec::size()), found[k]);
      }
    }
    for (int k = 0; k < kPair; ++k) {
      put_each<A>(math::softcapped(found[k], static_cast<A>(softcap)),
                  largest + row + k * Vec::size());
    }
  });
}

// z in place of logits, and how it moves with them, where these are not the same.
template <typename A>
void apply_softcap(const Tile& tile, const TileMemory<A>& memory) {
  using Vec = VecOf<A>;
  if (tile.softcap == 0) return;
  const A softcap = static_cast<A>(tile.softcap);
  for (int64_t i = 0; i < tile.classes * kTileRows; i += Vec::size()) {
    const Vec x = Vec::loadu(memory.exponentials + i);
    math::softcap_slope(x, softcap).store(memory.slopes + i);
    math::softcapped(x, softcap).store(memory.exponentials + i);
  }
}

template <typename A>
void load_probabilities(const Tile& tile, const TileMemory<A>& memory) {
  const auto load = [&]<typename From>() {
    load_tile<From>(tile.shares.probabilities, tile.probabilities, tile.rows, tile.classes,
                    memory.moving, memory.probabilities);
  };
  // Doubles' are doubles.
  if constexpr (!std::is_same_v<A, double>) {
    if (tile.shares.dtype == c10::ScalarType::Half) return load.template operator()<c10::Half>();
    if (tile.shares.dtype == c10::ScalarType::BFloat16) {
      return load.template operator()<c10::BFloat16>();
    }
  }
  load.template operator()<A>();
}

// Shares and spread, but for the targets'.
template <typename A>
void add_shares(const Tile& tile, const TileMemory<A>& memory, TilePart& part) {
  using Vec = VecOf<A>;
  const TileShareVectors<A> shares(tile, memory.probabilities);
  for (int64_t row = 0; row < kTileRows; row += Vec::size()) {
    const Vec largest = load_as<A>(part.largest + row);
    const Vec target = load_as<A>(tile.targets + row);
    LaneSums<A> sum;
    LaneSums<A> spread;
    for (int64_t c = 0; c < tile.classes; ++c) {
      const Vec is_target = target == Vec(static_cast<A>(c));
      const Vec below = largest - Vec::loadu(memory.exponentials + c * kTileRows + row);
      const Vec share = Vec::blendv(shares.at(c, row), Vec(0), is_target);
      sum.add(share);
      // Nothing times infinity would be no number.
      spread.add(share * Vec::blendv(below, Vec(0), is_target));
    }
    sum.put(part.shares + row, 1);
    spread.put(part.spread + row, 1);
  }
  for (int64_t row = 0; row < kTileRows; ++row) {
    part.spread[row] +=
        math::times_or_zero(part.shares[row], part.reference[row] - part.largest[row]);
  }
}

template <typename scalar_t>
void load(const Tile& tile, const TileMemory<acc_t<scalar_t>>& memory) {
  load_tile<scalar_t>(tile.logits, tile.layout, tile.rows, tile.classes, memory.moving,
                      memory.exponentials);
  if (tile.shares.probabilities != nullptr) load_probabilities(tile, memory);
}

// Their exponentials are to be 0.
template <typename A>
void take_targets_out(const Tile& tile, A* z) {
  for (int64_t row = 0; row < tile.rows; ++row) {
    if (tile.targets[row] >= 0) z[tile.targets[row] * kTileRows + row] = -kInfinity<A>;
  }
}

template <typename scalar_t>
void tile_part_of(const Tile& tile, void* bytes, TilePart& part, int64_t* argmax) {
  using A = acc_t<scalar_t>;
  using Vec = VecOf<A>;
  constexpr double kUnbias = std::is_same_v<A, double> ? 1 : math::kUnbias;
  const TileMemory<A> memory(tile, bytes);
  load<scalar_t>(tile, memory);
  A* const z = memory.exponentials;
  find_largest(z, tile.classes, tile.softcap, part.largest);
  if (argmax != nullptr) find_first_largest(z, tile.classes, argmax);
  apply_softcap(tile, memory);
  const References<A> references(part.largest, part.reference);
  for (int64_t row = 0; row < kTileRows; ++row) {
    const bool exists = row < tile.rows && tile.targets[row] >= 0;
    part.target_z[row] = -kInfinity<double>;
    if (exists) {
      const double x = raw_logit<scalar_t>(tile, row, tile.targets[row]);
      part.target_z[row] = math::softcapped(x, tile.softcap);
    }
    part.shares[row] = part.spread[row] = part.entropy[row] = 0;
  }
  if (tile.shares.any()) add_shares(tile, memory, part);
  take_targets_out(tile, z);
  each_row_pair<A>([&](int64_t row) {
    LaneSums<A> sums[kPair];
    // So much smaller than what is added beside them that they need no double.
    Vec lows[kPair] = {};
    const auto add = [&](int k, const Vec& e, const Vec& low) {
      sums[k].add(e);
      if constexpr (std::is_same_v<scalar_t, float>) lows[k] = lows[k] + low;
    };
    if (argmax == nullptr) {
      exponentials_of_pair<scalar_t>(
          memory, tile.classes, references, row,
          [&](int k, const Vec&, const Vec& e, const Vec& low) { add(k, e, low); });
    } else {
      LaneSums<A> entropies[kPair];
      const Vec furthest(A(1000));  // where exponentials are 0, and 0 times infinity no number
      const Vec top[kPair] = {load_as<A>(part.largest + row),
                              load_as<A>(part.largest + row + Vec::size())};
      exponentials_of_pair<scalar_t>(memory, tile.classes, references, row,
                                     [&](int k, const Vec& z, const Vec& e, const Vec& low) {
                                       add(k, e, low);
                                       entropies[k].add(e * at::vec::minimum(top[k] - z, furthest));
                                     });
      for (int k = 0; k < kPair; ++k) {
        entropies[k].put(part.entropy + row + k * Vec::size(), kUnbias);
      }
    }
    for (int k = 0; k < kPair; ++k) {
      sums[k].add(lows[k]);
      sums[k].put(part.sum + row + k * Vec::size(), kUnbias);
    }
  });
  if (argmax == nullptr) return;
  for (int64_t row = 0; row < kTileRows; ++row) {
    part.entropy[row] += part.sum[row] * (part.reference[row] - part.largest[row]);
  }
}

}  // namespace

void tile_part(const Tile& tile, void* memory, TilePart& part, int64_t* argmax) {
  with_logit_type(tile.dtype,
                  [&]<typename scalar_t>() { tile_part_of<scalar_t>(tile, memory, part, argmax); });
}

void tile_exponentials(const Tile& tile, void* bytes, const TileNumbers& largest,
                       TileNumbers& reference) {
  with_logit_type(tile.dtype, [&]<typename scalar_t>() {
    using A = acc_t<scalar_t>;
    const TileMemory<A> memory(tile, bytes);
    load<scalar_t>(tile, memory);
    apply_softcap(tile, memory);
    take_targets_out(tile, memory.exponentials);
    const References<A> references(largest, reference);
    each_row_pair<A>([&](int64_t row) {
      exponentials_of_pair<scalar_t>(memory, tile.classes, references, row,
                                     [](int, const auto&, const auto&, const auto&) {});
    });
  });
}

void tile_loss(const Tile& tile, const TilePart& part, const TileNumbers& target_share,
               double z_loss, bool with_metrics, TileLoss& loss) {
  using Vec = VecOf<double>;
  for (int64_t row = 0; row < kTileRows; row += Vec::size()) {
    const auto at = [&](const TileNumbers& numbers) { return Vec::loadu(numbers + row); };
    const math::RowPart<Vec> others = {at(part.largest), at(part.reference), at(part.sum),
                                       at(part.shares),  at(part.spread),    at(part.entropy)};
    const math::RowTarget<Vec> target = {tile.has_targets(), at(part.target_z), at(target_share)};
    const math::RowLoss<Vec> of_rows = math::row_loss(others, target, z_loss);
    of_rows.loss.store(loss.loss + row);
    of_rows.statistics.largest.store(loss.statistics.largest + row);
    of_rows.statistics.sum.store(loss.statistics.sum + row);
    of_rows.statistics.others.store(loss.statistics.others + row);
    of_rows.statistics.shares.store(loss.statistics.shares + row);
    if (!with_metrics) continue;
    of_rows.lse.store(loss.lse + row);
    of_rows.entropy.store(loss.entropy + row);
  }
}

}  // namespace ampfuse::CPU_CAPABILITY
