// Computes the gradient of a row from its exponentials. The gradient is rounded once.
#include "../../math/cross_entropy_exponential.h"
#include "cross_entropy.h"
#include "cross_entropy_class_masses.h"
#include "cross_entropy_logits.h"
#include "lane.h"

namespace ampfuse::CPU_CAPABILITY {

namespace {

// Writes the vectors value(i) to out[0, count). Lanes after the end are not used.
template <typename out_t, typename Value>
void write_each(out_t* out, int64_t count, const Value& value) {
  using Vec = AccVec<out_t>;
  using Out = at::vec::Vectorized<out_t>;
  int64_t i = 0;
  const auto write = [&](int64_t size) {
    if constexpr (kIs16Bit<out_t>) {
      const Vec low = value(i);
      const Vec high = size > Vec::size() ? value(i + Vec::size()) : Vec(0);
      at::vec::convert_from_float<out_t>(low, high).store(out + i, size);
    } else {
      value(i).store(out + i, size);
    }
  };
  for (; i + Out::size() <= count; i += Out::size()) write(Out::size());
  if (i < count) write(count - i);
}

// Returns dz/dx of the logits from i on.
template <typename scalar_t>
AccVec<scalar_t> slope(const Logits& logits, int64_t i) {
  const auto* const x = static_cast<const scalar_t*>(logits.data) + i;
  const int64_t rest = std::min<int64_t>(AccVec<scalar_t>::size(), logits.count - i);
  return math::softcap_slope(load_one(x, rest), logits.softcap);
}

// The term of the exponentials in the gradient.
template <typename scalar_t>
class OfExponentials {
 public:
  using A = acc_t<scalar_t>;
  using Vec = AccVec<scalar_t>;

  OfExponentials(const void* exponentials, double factor)
      : exponentials_(static_cast<const A*>(exponentials)) {
    if constexpr (std::is_same_v<scalar_t, double>) {
      factor_ = factor;
    } else {
      factor_ = math::biased_factor(factor);
    }
  }

  Vec at(int64_t i) const {
    const Vec e = Vec::loadu(exponentials_ + i);
    if constexpr (std::is_same_v<scalar_t, double>) {
      return e * Vec(factor_);
    } else if constexpr (std::is_same_v<scalar_t, float>) {
      return factor_.times(math::InTwo<Vec>{e, Vec::loadu(exponentials_ + kClassBlock + i)});
    } else {
      return factor_.times(e);
    }
  }

 private:
  const A* exponentials_;
  std::conditional_t<std::is_same_v<scalar_t, double>, double, math::BiasedFactor> factor_;
};

template <typename scalar_t, typename out_t>
void row_gradient(const Logits& logits, const ClassMasses& masses, const void* exponentials,
                  const math::RowGradient<double>& gradient, out_t* out) {
  using A = acc_t<scalar_t>;
  using Vec = AccVec<scalar_t>;
  double of_target = gradient.of_target;
  if (logits.target >= 0 && logits.softcap != 0) {
    const auto x = static_cast<const scalar_t*>(logits.data)[logits.target];
    of_target *= math::softcap_slope(double{static_cast<A>(x)}, logits.softcap);
  }
  const OfExponentials<scalar_t> of_exponentials(exponentials, gradient.of_exponential);
  if (masses.any() || logits.softcap != 0) {
    const ClassMassVectors<A> classes(masses);
    const Vec minus_scale(static_cast<A>(-gradient.scale));
    write_each(out, logits.count, [&](int64_t i) {
      const int64_t rest = std::min<int64_t>(Vec::size(), logits.count - i);
      Vec g = of_exponentials.at(i);
      if (masses.any()) {
        g = math::Lane<Vec>::multiply_add(minus_scale, classes.at(i, rest), g);
      }
      return logits.softcap != 0 ? g * slope<scalar_t>(logits, i) : g;
    });
  } else {
    write_each(out, logits.count, [&](int64_t i) { return of_exponentials.at(i); });
  }
  if (logits.target >= 0) out[logits.target] = static_cast<out_t>(of_target);
}

}  // namespace

void row_gradient(const Logits& logits, const ClassMasses& masses, const void* exponentials,
                  const math::RowGradient<double>& gradient, void* out, c10::ScalarType out_dtype) {
  with_logit_type(logits.dtype, [&]<typename scalar_t>() {
    with_gradient_type<scalar_t>(out_dtype, [&]<typename out_t>() {
      row_gradient<scalar_t>(logits, masses, exponentials, gradient, static_cast<out_t*>(out));
    });
  });
}

}  // namespace ampfuse::CPU_CAPABILITY
