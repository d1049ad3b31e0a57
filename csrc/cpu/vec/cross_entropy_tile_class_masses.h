// B of the classes (math/cross_entropy.h) in a tile, one vector of rows at a time.
#pragma once

#include "cross_entropy_tile.h"
#include "lane.h"

namespace ampfuse::CPU_CAPABILITY {

template <typename A>
class TileClassMassVectors {
 public:
  using Vec = at::vec::Vectorized<A>;

  /// `probabilities`: [classes][kTileRows]. Not used if targets are indices.
  TileClassMassVectors(const Tile& tile, const A* probabilities)
      : weight_(static_cast<const A*>(tile.masses.weight)),
        probabilities_(tile.masses.probabilities == nullptr ? nullptr : probabilities),
        of_probability_(static_cast<A>(tile.masses.of_probability)),
        uniform_(static_cast<A>(tile.masses.uniform)) {}

  /// Returns B of class c for a vector of rows from `row` on.
  Vec at(int64_t c, int64_t row) const {
    Vec mass = uniform_;
    if (probabilities_ != nullptr) {
      const Vec probability = Vec::loadu(probabilities_ + c * kTileRows + row);
      mass = math::Lane<Vec>::multiply_add(of_probability_, probability, mass);
    }
    return weight_ == nullptr ? mass : mass * Vec(weight_[c]);
  }

 private:
  const A* weight_;
  const A* probabilities_;
  Vec of_probability_;
  Vec uniform_;
};

}  // namespace ampfuse::CPU_CAPABILITY
