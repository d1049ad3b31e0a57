// Partial results of a block of a row. Its logits are read once from memory, then from the L1
// cache. One exponential is computed per logit. Sums are double; exponentials of 16-bit logits are
// first added in pairs in fp32.
#include "cross_entropy.h"

#include "../../math/cross_entropy_exponential.h"
#include "cross_entropy_class_masses.h"
#include "cross_entropy_logits.h"
#include "lane.h"
#include "to_double.h"

namespace ampfuse::CPU_CAPABILITY {

namespace {

using at::vec::Vectorized;
using RowPartial = math::RowPartial<double>;

// A sum over pairs of vectors.
template <typename scalar_t>
class Sum {
 public:
  using Vec = AccVec<scalar_t>;

  // Call it with chain 0, then with chain 1: for 16-bit logits, the two are first added in fp32.
  void add(int chain, const Vec& x) {
    if constexpr (std::is_same_v<scalar_t, double>) {
      sums_[chain][0] = sums_[chain][0] + x;
    } else if constexpr (std::is_same_v<scalar_t, float>) {
      add_widened(chain, x);
    } else if (chain == 0) {
      first_ = x;
    } else {
      add_widened(0, first_ + x);
    }
  }

  // Adds low parts of exponentials, which are so small that an fp32 sum is accurate enough.
  void add_low(int chain, const Vec& x) {
    if constexpr (std::is_same_v<scalar_t, float>) lows_[chain] = lows_[chain] + x;
  }

  double get() const {
    const Lanes sum = (sums_[0][0] + sums_[1][0]) + (sums_[0][1] + sums_[1][1]);
    if constexpr (std::is_same_v<scalar_t, float>) {
      const auto [low, high] = to_double(lows_[0] + lows_[1]);
      return of_lanes(sum + (low + high));
    } else {
      return of_lanes(sum);
    }
  }

 private:
  using Lanes = Vectorized<double>;

  void add_widened(int chain, const Vectorized<float>& x) {
    const auto [low, high] = to_double(x);
    sums_[chain][0] = sums_[chain][0] + low;
    sums_[chain][1] = sums_[chain][1] + high;
  }

  static double of_lanes(const Vectorized<double>& x) {
    double lanes[Vectorized<double>::size()];
    x.store(lanes);
    for (int step = 1; step < Vectorized<double>::size(); step *= 2) {
      for (int i = 0; i < Vectorized<double>::size(); i += 2 * step) lanes[i] += lanes[i + step];
    }
    return lanes[0];
  }

  Lanes sums_[kPair][2] = {};
  Vec lows_[kPair] = {};
  Vec first_ = {};
};

// Returns the reference that exponentials are relative to.
template <typename scalar_t>
auto reference_of(acc_t<scalar_t> largest) {
  if constexpr (std::is_same_v<scalar_t, double>) {
    struct Largest {
      double largest;
      double value() const { return largest; }
    };
    return Largest{largest};
  } else {
    return math::exp_reference(largest);
  }
}

// Returns z of logits. kCapped is a template parameter, because a loop that contains a call of tanh
// cannot keep its values in registers.
template <typename scalar_t, bool kCapped>
AccVec<scalar_t> softcapped(const AccVec<scalar_t>& x, double softcap) {
  if constexpr (!kCapped) return x;
  return math::softcapped(x, static_cast<acc_t<scalar_t>>(softcap));
}

// Writes the exponentials of all classes, with 0 for the target. Calls visit(chain, z, exponential,
// low part of the exponential) for each vector.
template <typename scalar_t, bool kCapped, typename Reference, typename Visit>
void write_exponentials_of(const Logits& logits, const Reference& reference, acc_t<scalar_t>* out,
                           const Visit& visit) {
  using Vec = AccVec<scalar_t>;
  each_pair<scalar_t>(logits, /*without_target=*/true, [&](int64_t i, const Vec(&x)[kPair]) {
#pragma GCC unroll 2
    for (int k = 0; k < kPair; ++k) {
      Vec z = softcapped<scalar_t, kCapped>(x[k], logits.softcap);
      // Lanes without a class, and the target's, were -infinity before the softcap: restore this.
      if constexpr (kCapped) z = without_target(logits, i + k * Vec::size(), z);
      acc_t<scalar_t>* const to = out + i + k * Vec::size();
      if constexpr (std::is_same_v<scalar_t, double>) {
        const Vec e = (z - Vec(reference.value())).exp();
        e.store(to);
        visit(k, z, e, Vec(0));
      } else if constexpr (std::is_same_v<scalar_t, float>) {
        const auto [high, low] = math::biased_exp_in_two(z, reference);
        high.store(to);
        low.store(to + kClassBlock);
        visit(k, z, high, low);
      } else {
        const Vec e = math::biased_exp(z, reference);
        e.store(to);
        visit(k, z, e, Vec(0));
      }
    }
  });
}

template <typename scalar_t, typename Reference, typename Visit>
void write_exponentials(const Logits& logits, const Reference& reference, acc_t<scalar_t>* out,
                        const Visit& visit) {
  logits.softcap == 0 ? write_exponentials_of<scalar_t, false>(logits, reference, out, visit)
                      : write_exponentials_of<scalar_t, true>(logits, reference, out, visit);
}

// Computes `masses` and `spread` of a block, without its target.
template <typename scalar_t>
void add_masses(const Logits& logits, const ClassMasses& masses, RowPartial& partial) {
  using Vec = AccVec<scalar_t>;
  const ClassMassVectors<acc_t<scalar_t>> classes(masses);
  // If all logits are -infinity, z is subtracted from the reference, since −∞ − (−∞) would be NaN.
  const bool is_all_minus_infinity = partial.largest == math::minus_infinity<double>();
  const double from = is_all_minus_infinity ? partial.reference : partial.largest;
  Sum<scalar_t> sum;
  Sum<scalar_t> spread;
  each_pair<scalar_t>(logits, /*without_target=*/false, [&](int64_t first, const Vec(&x)[kPair]) {
#pragma GCC unroll 2
    for (int k = 0; k < kPair; ++k) {
      const int64_t i = first + k * Vec::size();
      const int64_t rest = std::clamp<int64_t>(logits.count - i, 0, Vec::size());
      const Vec mass = with_lane(classes.at(i, rest), logits.target - i, 0);
      const Vec z = logits.softcap == 0 ? x[k] : softcapped<scalar_t, true>(x[k], logits.softcap);
      Vec below = Vec(static_cast<acc_t<scalar_t>>(from)) - z;
      // `below` is 0 in lanes without a class and for the target, because 0 · infinity would be
      // NaN.
      if (rest < Vec::size()) below = Vec::set(Vec(0), below, rest);
      below = with_lane(below, logits.target - i, 0);
      sum.add(k, mass);
      spread.add(k, mass * below);
    }
  });
  partial.masses = sum.get();
  partial.spread = spread.get() + math::times_or_zero(partial.masses, partial.reference - from);
}

template <typename scalar_t>
RowPartial row_partial(const Logits& logits, const ClassMasses& masses, bool with_entropy,
                       acc_t<scalar_t>* exponentials) {
  using A = acc_t<scalar_t>;
  using Vec = AccVec<scalar_t>;
  const A largest =
      static_cast<A>(math::softcapped(double{largest_logit<scalar_t>(logits)}, logits.softcap));
  RowPartial partial;
  partial.largest = largest;
  if (!math::is_finite(largest)) {
    // All logits are -infinity, or the row has no distribution.
    if (masses.any()) add_masses<scalar_t>(logits, masses, partial);
    std::fill_n(exponentials, kExponentials, A(0));
    return partial;
  }
  const auto reference = reference_of<scalar_t>(largest);
  partial.reference = reference.value();
  if (masses.any()) add_masses<scalar_t>(logits, masses, partial);
  Sum<scalar_t> sum;
  if (with_entropy) {
    Sum<scalar_t> entropy;
    const Vec top(largest);
    const Vec furthest(A(1000));  // exponentials are 0 there, and 0 · infinity would be NaN
    write_exponentials<scalar_t>(logits, reference, exponentials,
                                 [&](int chain, const Vec& z, const Vec& e, const Vec& low) {
                                   sum.add(chain, e);
                                   sum.add_low(chain, low);
                                   entropy.add(chain, e * at::vec::minimum(top - z, furthest));
                                 });
    partial.entropy = entropy.get() * kUnbias<scalar_t> +
                      sum.get() * kUnbias<scalar_t> * (partial.reference - partial.largest);
  } else {
    write_exponentials<scalar_t>(logits, reference, exponentials,
                                 [&](int chain, const Vec&, const Vec& e, const Vec& low) {
                                   sum.add(chain, e);
                                   sum.add_low(chain, low);
                                 });
  }
  partial.sum = sum.get() * kUnbias<scalar_t>;
  return partial;
}

}  // namespace

math::RowPartial<double> row_partial(const Logits& logits, const ClassMasses& masses,
                                     bool with_entropy, void* exponentials) {
  return with_logit_type(logits.dtype, [&]<typename scalar_t>() {
    return row_partial<scalar_t>(logits, masses, with_entropy,
                                 static_cast<acc_t<scalar_t>*>(exponentials));
  });
}

void row_exponentials(const Logits& logits, double largest, void* exponentials) {
  with_logit_type(logits.dtype, [&]<typename scalar_t>() {
    using A = acc_t<scalar_t>;
    auto* const out = static_cast<A*>(exponentials);
    if (!math::is_finite(largest)) {
      std::fill_n(out, kExponentials, A(0));
      return;
    }
    write_exponentials<scalar_t>(logits, reference_of<scalar_t>(static_cast<A>(largest)), out,
                                 [](int, const auto&, const auto&, const auto&) {});
  });
}

double row_reference(c10::ScalarType dtype, double largest) {
  return with_logit_type(dtype, [&]<typename scalar_t>() -> double {
    return reference_of<scalar_t>(static_cast<acc_t<scalar_t>>(largest)).value();
  });
}

}  // namespace ampfuse::CPU_CAPABILITY
