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
    const void* const all = masses_.probabilities;
    if constexpr (!std::is_same_v<A, double>) {  // probabilities of double logits are double
      using c10::BFloat16, c10::Half, c10::ScalarType;
      if (masses_.dtype == ScalarType::Half)
        return load_one(static_cast<const Half*>(all) + i, rest);
      if (masses_.dtype == ScalarType::BFloat16) {
        return load_one(static_cast<const BFloat16*>(all) + i, rest);
      }
    }
    return Vec::loadu(static_cast<const A*>(all) + i, rest);
  }

  const ClassMasses& masses_;
  Vec of_probability_;
  Vec uniform_;
};

}  // namespace ampfuse::CPU_CAPABILITY
