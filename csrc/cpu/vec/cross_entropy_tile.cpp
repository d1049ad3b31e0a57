// Partial results and losses of a tile of rows. All loops go over classes, for one vector of rows
// at a time, so that sums stay in registers. Lanes are independent, so that no row's result depends
// on the rows beside it.
#include "cross_entropy_tile.h"

#include "cross_entropy_lane_sums.h"
#include "cross_entropy_tile_class_masses.h"
#include "cross_entropy_tile_exponentials.h"
#include "cross_entropy_tile_memory.h"
#include "lane.h"

namespace ampfuse::CPU_CAPABILITY {

namespace {

// Finds the class of each row's largest logit, the first one if several are equal. A NaN is larger
// than all numbers, as in torch.
template <typename A>
void find_first_largest(const Tile& tile, const A* x, int64_t* argmax) {
  using Vec = VecOf<A>;
  for (int64_t row = 0; row < tile.lanes(); row += Vec::size()) {
    Vec best(-kInfinity<A>);
    Vec at(A(0));
    for (int64_t c = 0; c < tile.classes; ++c) {
      const Vec value = Vec::loadu(x + c * kTileRows + row);
      const Vec is_above = (value > best) | ((value != value) & (best == best));
      best = Vec::blendv(best, value, is_above);
      at = Vec::blendv(at, Vec(static_cast<A>(c)), is_above);
    }
    A numbers[Vec::size()];
    at.store(numbers);
    for (int64_t i = 0; i < Vec::size(); ++i) argmax[row + i] = static_cast<int64_t>(numbers[i]);
  }
}

// Finds the target's logit and the largest z of each row. The latter may miss a NaN, which then
// shows in the sums.
template <typename A>
void find_largest(const Tile& tile, const A* x, TileTargets& targets, TileNumbers& largest) {
  using Vec = VecOf<A>;
  for (int64_t row = 0; row < tile.lanes(); row += Vec::size()) {
    const Vec target = load_as<A>(targets.index + row);
    Vec found(-kInfinity<A>);
    Vec own(-kInfinity<A>);
    for (int64_t c = 0; c < tile.classes; ++c) {
      const Vec value = Vec::loadu(x + c * kTileRows + row);
      found = at::vec::clamp_min(value, found);
      own = math::Lane<Vec>::choose_equal(target, Vec(static_cast<A>(c)), value, own);
    }
    store_as_double<A>(own, targets.logit + row);
    store_as_double<A>(math::softcapped(found, static_cast<A>(tile.terms.softcap)), largest + row);
  }
}

// Replaces the logits by z and computes the slopes dz/dx, if there is a softcap.
template <typename A>
void apply_softcap(const Tile& tile, const TileMemory<A>& memory) {
  using Vec = VecOf<A>;
  if (tile.terms.softcap == 0) return;
  const A softcap = static_cast<A>(tile.terms.softcap);
  for (int64_t i = 0; i < tile.classes * kTileRows; i += Vec::size()) {
    const Vec x = Vec::loadu(memory.exponentials + i);
    math::softcap_slope(x, softcap).store(memory.slopes + i);
    math::softcapped(x, softcap).store(memory.exponentials + i);
  }
}

template <typename A>
void load_probabilities(const Tile& tile, const TileMemory<A>& memory) {
  const auto load = [&]<typename From>() {
    load_tile<From>(tile.masses.probabilities, tile.probability_layout, tile.rows, tile.classes,
                    memory.moving, memory.probabilities);
  };
  // Probabilities of double logits are double.
  if constexpr (!std::is_same_v<A, double>) {
    if (tile.masses.dtype == c10::ScalarType::Half) return load.template operator()<c10::Half>();
    if (tile.masses.dtype == c10::ScalarType::BFloat16) {
      return load.template operator()<c10::BFloat16>();
    }
  }
  load.template operator()<A>();
}

// Computes `masses` and `spread`, without the targets.
template <typename A>
void add_masses(const Tile& tile, const TileMemory<A>& memory, const TileTargets& targets,
                TilePartial& partial) {
  using Vec = VecOf<A>;
  const TileClassMassVectors<A> masses(tile, memory.probabilities);
  for (int64_t row = 0; row < tile.lanes(); row += Vec::size()) {
    const Vec largest = load_as<A>(partial.largest + row);
    // If all logits are -infinity, z is subtracted from 0, since −∞ − (−∞) would be NaN.
    const Vec from = math::Lane<Vec>::choose_equal(largest, Vec(-kInfinity<A>), Vec(0), largest);
    const Vec target = load_as<A>(targets.index + row);
    LaneSums<A> sum;
    LaneSums<A> spread;
    for (int64_t c = 0; c < tile.classes; ++c) {
      const Vec is_target = target == Vec(static_cast<A>(c));
      const Vec below = from - Vec::loadu(memory.exponentials + c * kTileRows + row);
      const Vec mass = Vec::blendv(masses.at(c, row), Vec(0), is_target);
      sum.add(mass);
      // `below` is replaced by 0 for the target, because 0 · infinity would be NaN.
      spread.add(mass * Vec::blendv(below, Vec(0), is_target));
    }
    sum.put(partial.masses + row, 1);
    spread.put(partial.spread + row, 1);
  }
  for (int64_t row = 0; row < tile.rows; ++row) {
    if (partial.largest[row] == math::minus_infinity<double>()) continue;  // the reference is 0
    partial.spread[row] +=
        math::times_or_zero(partial.masses[row], partial.reference[row] - partial.largest[row]);
  }
}

template <typename scalar_t>
void load(const Tile& tile, const TileMemory<acc_t<scalar_t>>& memory) {
  load_tile<scalar_t>(tile.logits, tile.layout, tile.rows, tile.classes, memory.moving,
                      memory.exponentials);
  if (tile.masses.probabilities != nullptr) load_probabilities(tile, memory);
}

template <typename Index>
void read_indices(const void* from, int64_t ignore_index, int64_t rows, TileNumbers& index) {
  const auto* const targets = static_cast<const Index*>(from);
  for (int64_t row = 0; row < rows; ++row) {
    const int64_t target = targets[row];
    index[row] = target == ignore_index ? kIgnored : static_cast<double>(target);
  }
}

// Reads the class and mass of each target; find_largest() finds its logit.
template <typename A>
void read_targets(const Tile& tile, TileTargets& targets) {
  const auto read = [&]<typename Index>() {
    read_indices<Index>(tile.targets, tile.ignore_index, tile.rows, targets.index);
  };
  if (tile.rows < kTileRows) std::fill_n(targets.index, kTileRows, kIgnored);
  if (!tile.has_targets()) {
    // The loss of a distribution over 0 classes is 0.
    std::fill_n(targets.index, tile.rows, tile.classes > 0 ? kNoClass : kIgnored);
  } else if (tile.target_dtype == c10::ScalarType::Long) {
    read.template operator()<int64_t>();
  } else if (tile.target_dtype == c10::ScalarType::Int) {
    read.template operator()<int32_t>();
  } else {
    read.template operator()<uint8_t>();
  }
  const double mass = tile.terms.of_target + tile.terms.uniform;
  for (int64_t row = 0; row < kTileRows; ++row) {
    targets.mass[row] = targets.index[row] >= 0 ? mass : 0;
  }
  const auto* const weight = static_cast<const A*>(tile.masses.weight);
  if (weight == nullptr) return;
  for (int64_t row = 0; row < tile.rows; ++row) {
    const auto index = static_cast<int64_t>(targets.index[row]);
    if (index >= 0) targets.mass[row] *= static_cast<double>(weight[index]);
  }
}

template <typename scalar_t>
void tile_partial_of(const Tile& tile, void* bytes, TilePartial& partial, TileTargets& targets,
                     int64_t* argmax) {
  using A = acc_t<scalar_t>;
  using Vec = VecOf<A>;
  const TileMemory<A> memory(tile, bytes);
  load<scalar_t>(tile, memory);
  read_targets<A>(tile, targets);
  find_largest(tile, memory.exponentials, targets, partial.largest);
  if (argmax != nullptr) find_first_largest(tile, memory.exponentials, argmax);
  apply_softcap(tile, memory);
  math::ExpReferenceOf<Vec> references[kTileRows / Vec::size()];
  for (int64_t row = 0; row < tile.lanes(); row += Vec::size()) {
    references[row / Vec::size()] = reference_of_rows<A>(partial.largest, row, partial.reference);
  }
  std::fill_n(partial.masses, kTileRows, 0);
  std::fill_n(partial.spread, kTileRows, 0);
  std::fill_n(partial.entropy, kTileRows, 0);
  if (tile.masses.any()) add_masses(tile, memory, targets, partial);
  for (int64_t row = 0; row < tile.lanes(); row += Vec::size()) {
    const auto& reference = references[row / Vec::size()];
    LaneSums<A> sum;
    Vec lows = 0;  // low parts of exponentials, so small that an fp32 sum is accurate enough
    const auto add = [&](const Vec& e, const Vec& low) {
      sum.add(e);
      if constexpr (std::is_same_v<scalar_t, float>) lows = lows + low;
    };
    if (argmax == nullptr) {
      write_exponentials<scalar_t>(memory, tile.classes, reference, targets, row,
                                   [&](const Vec&, const Vec& e, const Vec& low) { add(e, low); });
    } else {
      LaneSums<A> entropy;
      const Vec furthest(A(1000));  // exponentials are 0 there, and 0 · infinity would be NaN
      const Vec top = load_as<A>(partial.largest + row);
      write_exponentials<scalar_t>(memory, tile.classes, reference, targets, row,
                                   [&](const Vec& z, const Vec& e, const Vec& low) {
                                     add(e, low);
                                     entropy.add(e * at::vec::minimum(top - z, furthest));
                                   });
      entropy.put(partial.entropy + row, kUnbias<scalar_t>);
    }
    sum.add(lows);
    sum.put(partial.sum + row, kUnbias<scalar_t>);
  }
  if (argmax == nullptr) return;
  for (int64_t row = 0; row < tile.rows; ++row) {
    partial.entropy[row] += partial.sum[row] * (partial.reference[row] - partial.largest[row]);
  }
}

// Adds the numbers in the order in which vectors of 8 would, whatever the vector width, so that all
// instruction sets give the same bits.
double sum_of(const TileNumbers& numbers) {
  constexpr int64_t kSums = 8;
  double sums[kSums] = {};
  for (int64_t i = 0; i < kTileRows; i += kSums) {
    for (int64_t k = 0; k < kSums; ++k) sums[k] += numbers[i + k];
  }
  for (int64_t step = 1; step < kSums; step *= 2) {
    for (int64_t i = 0; i < kSums; i += 2 * step) sums[i] += sums[i + step];
  }
  return sums[0];
}

}  // namespace

void tile_partial(const Tile& tile, void* memory, TilePartial& partial, TileTargets& targets,
                  int64_t* argmax) {
  with_logit_type(tile.dtype, [&]<typename scalar_t>() {
    tile_partial_of<scalar_t>(tile, memory, partial, targets, argmax);
  });
}

void tile_exponentials(const Tile& tile, void* bytes, const TileNumbers& largest,
                       TileNumbers& reference, TileTargets& targets) {
  with_logit_type(tile.dtype, [&]<typename scalar_t>() {
    using A = acc_t<scalar_t>;
    const TileMemory<A> memory(tile, bytes);
    load<scalar_t>(tile, memory);
    read_targets<A>(tile, targets);
    if (tile.terms.softcap != 0) {  // only then the gradient depends on the target's logit
      TileNumbers found;            // not used: the largest z are known
      find_largest(tile, memory.exponentials, targets, found);
      apply_softcap(tile, memory);
    }
    for (int64_t row = 0; row < tile.lanes(); row += VecOf<A>::size()) {
      write_exponentials<scalar_t>(memory, tile.classes,
                                   reference_of_rows<A>(largest, row, reference), targets, row,
                                   [](const auto&, const auto&, const auto&) {});
    }
  });
}

void tile_loss(const Tile& tile, const TilePartial& partial, const TileTargets& targets,
               bool with_metrics, TileLoss& loss) {
  using Vec = VecOf<double>;
  using L = math::Lane<Vec>;
  if (tile.rows < kTileRows) std::fill_n(loss.loss, kTileRows, 0);
  for (int64_t row = 0; row < tile.lanes(); row += Vec::size()) {
    const auto at = [&](const TileNumbers& numbers) { return Vec::loadu(numbers + row); };
    const math::RowPartial<Vec> others = {at(partial.largest), at(partial.reference),
                                          at(partial.sum),     at(partial.masses),
                                          at(partial.spread),  at(partial.entropy)};
    const Vec index = at(targets.index);
    const Vec z =
        L::choose(index >= Vec(0), math::softcapped(at(targets.logit), tile.terms.softcap),
                  Vec(-kInfinity<double>));
    const math::RowTarget<Vec> target = {tile.has_targets(), z, at(targets.mass)};
    const math::RowLoss<Vec> of_rows = math::row_loss(others, target, tile.terms);
    const auto put = [&](const Vec& x, TileNumbers& to) {
      L::choose_equal(index, Vec(kIgnored), Vec(0), x).store(to + row);
    };
    put(of_rows.loss, loss.loss);
    put(of_rows.statistics.largest, loss.statistics.largest);
    put(of_rows.statistics.sum, loss.statistics.sum);
    put(of_rows.statistics.others, loss.statistics.others);
    put(of_rows.statistics.masses, loss.statistics.masses);
    if (!with_metrics) continue;
    of_rows.lse.store(loss.lse + row);
    of_rows.entropy.store(loss.entropy + row);
  }
  loss.total = sum_of(loss.loss);
}

}  // namespace ampfuse::CPU_CAPABILITY
