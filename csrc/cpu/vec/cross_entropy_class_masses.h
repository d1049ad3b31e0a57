// B of the classes of a row (math/cross_entropy.h), one vector at a time.
#pragma once

#include "cross_entropy_logits.h"
#include "lane.h"

namespace ampfuse::CPU_CAPABILITY {

template <typename A>
class ClassMassVectors {
 public:
  using Vec = at::vec::Vectorized<A>;

  explicit ClassMassVectors(const ClassMasses& masses)
      : masses_(masses),
        of_probability_(static_cast<A>(masses.of_probability)),
        uniform_(static_cast<A>(masses.uniform)) {}

  /// Returns B of the `rest` classes from i on, and 0 in the lanes after them.
  Vec at(int64_t i, int64_t rest) const {
    Vec mass = uniform_;
    if (masses_.probabilities != nullptr) {
      mass = math::Lane<Vec>::multiply_add(of_probability_, probabilities(i, rest), mass);
    }
    if (masses_.weight != nullptr) {
      mass = mass * Vec::loadu(static_cast<const A*>(masses_.weight) + i, rest);
    }
    return rest < Vec::size() ? Vec::set(Vec(0), mass, rest) : mass;
  }

 private:
  Vec probabilities(int64_t i, int64_t rest) const {
    switch (masses_.dtype) {
      case c10::ScalarType::Half:
        return widened<c10::Half>(i, rest);
      case c10::ScalarType::BFloat16:
        return widened<c10::BFloat16>(i, rest);
      default:
        return Vec::loadu(static_cast<const A*>(masses_.probabilities) + i, rest);
    }
  }

  template <typename scalar_t>
  Vec widened(int64_t i, int64_t rest) const {
    A values[Vec::size()] = {};
    const auto* const from = static_cast<const scalar_t*>(masses_.probabilities) + i;
    for (int64_t k = 0; k < rest; ++k) values[k] = static_cast<A>(from[k]);
    return Vec::loadu(values);
  }

  const ClassMasses& masses_;
  Vec of_probability_;
  Vec uniform_;
};

}  // namespace ampfuse::CPU_CAPABILITY
