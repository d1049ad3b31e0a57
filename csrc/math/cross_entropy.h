// Cross-entropy of one row of logits, and its gradient.
//
//   z = softcap·tanh(x / softcap), or the logit x itself without a softcap
//   lse = log Σ exp z,  p = exp(z − lse)
//   loss = Σ B·(lse − z) + z_loss·lse²          B = w·q, the mass of a class: its weight times its
//                                               target probability
//   ∂loss/∂z = A·p − B,  A = Σ B + 2·z_loss·lse
//
// q is the target distribution: for an index y with label smoothing ε it is 1 − ε + ε/V at y and
// ε/V elsewhere. If p_y is close to 1, these formulae are small differences of large numbers. So
// the terms of y are kept out of the sums over classes, which then cover the other classes only.
// With e = exp(z − m), m near the largest z, and s the sum of e over the other classes:
//
//   lse − z_y = log(1 + s/e_y) if e_y > s, else (m − z_y) + log(e_y + s)
//   ∂loss/∂z_y = A·p_y − B_y = (A − B_y) − A·s/(e_y + s),  A − B_y = Σ others' B + 2·z_loss·lse
#pragma once

#include <cmath>
#include <cstdint>
#include <type_traits>

#include "host_device.h"
#include "lane.h"

namespace ampfuse::math {

template <typename T>
AMPFUSE_HOST_DEVICE T minus_infinity() {
  return static_cast<T>(-HUGE_VAL);
}

// Partial sums over some classes of a row. The sums leave out the row's target class; `largest`
// includes it.
template <typename T>
struct RowPartial {
  T largest = minus_infinity<T>();  // largest z
  T reference = 0;                  // near `largest`; see cross_entropy_exponential.h
  T sum = 0;                        // Σ exp(z − reference)
  T masses = 0;                     // Σ B
  T spread = 0;                     // Σ B·(reference − z)
  T entropy = 0;                    // Σ exp(z − reference)·(reference − z)
};

// Returns x·y, or 0 if x is 0, even for an infinite y.
template <typename V>
AMPFUSE_HOST_DEVICE V times_or_zero(V x, V y) {
  return Lane<V>::choose(x == V(0), V(0), x * y);
}

// Returns a or b, selected field by field. Selecting by address would force both structs out of
// registers into memory.
template <typename T>
AMPFUSE_HOST_DEVICE RowPartial<T> choose(bool is_first, const RowPartial<T>& a,
                                         const RowPartial<T>& b) {
  return {is_first ? a.largest : b.largest, is_first ? a.reference : b.reference,
          is_first ? a.sum : b.sum,         is_first ? a.masses : b.masses,
          is_first ? a.spread : b.spread,   is_first ? a.entropy : b.entropy};
}

// Combines the partial sums of two disjoint sets of classes.
template <typename T>
AMPFUSE_HOST_DEVICE RowPartial<T> join(const RowPartial<T>& a, const RowPartial<T>& b) {
  const bool b_is_above = b.largest > a.largest || b.largest != b.largest;
  RowPartial<T> both = choose(b_is_above, b, a);
  const RowPartial<T> other = choose(b_is_above, a, b);
  both.masses += other.masses;
  // If every z of `other` is −∞, all its exponentials are 0 and its reference has no meaning.
  const bool is_all_minus_infinity = other.largest == minus_infinity<T>();
  const T below = is_all_minus_infinity ? 0 : both.reference - other.reference;
  both.spread += other.spread + times_or_zero(other.masses, below);
  if (is_all_minus_infinity) return both;
  const T factor = below == 0 ? 1 : std::exp(-below);
  both.sum += other.sum * factor;
  both.entropy += (other.entropy + times_or_zero(other.sum, below)) * factor;
  return both;
}

// Target index of a row whose target class belongs to another shard.
inline constexpr int64_t kElsewhere = -2;

// The options of a loss, in the form that the arithmetic of a row needs.
template <typename T, typename Number = T>
struct LossTerms {
  T of_target;  // 1 − label smoothing
  T uniform;    // label smoothing / number of all classes
  Number z_loss;
  T softcap;  // 0 without a softcap
};

// The target class of a row, or the target classes of a vector of rows. In a vector, a row without
// a target class has z = −∞ and mass 0.
template <typename V>
struct RowTarget {
  bool exists = false;  // false for a distribution, an ignored row or a target on another shard
  V z = 0;
  V mass = 0;  // B of the target class
};

// The data of a row that backward needs.
template <typename V>
struct Statistics {
  V largest;
  V sum;     // Σ exp(z − reference) over all classes
  V others;  // the same sum without the target class
  V masses;  // Σ B without the target class, except in math::JoinedRow
};
using RowStatistics = Statistics<double>;
inline constexpr int kRowStatistics = sizeof(RowStatistics) / sizeof(double);

template <typename V>
struct RowLoss {
  V loss;
  V lse;
  V entropy;  // −Σ p·log p
  Statistics<std::conditional_t<std::is_arithmetic_v<V>, double, V>> statistics;
};

// Returns x, or NaN if the row has no distribution: if its largest z is NaN, +∞ or −∞.
template <typename V>
AMPFUSE_HOST_DEVICE V if_distribution(const RowPartial<V>& row, const V& x) {
  return Lane<V>::choose(row.largest - row.largest == V(0), x, V(NAN));
}

// Returns exp(z − reference) of the target class, or 0 for rows without a target.
template <typename V>
AMPFUSE_HOST_DEVICE V target_exponential(const RowTarget<V>& target, V below) {
  return target.exists ? Lane<V>::exp(V(0) - below) : V(0);
}

// Returns what backward needs; `target_exp` is the result of target_exponential().
template <typename V>
AMPFUSE_HOST_DEVICE auto row_statistics(const RowPartial<V>& others, const V& target_exp)
    -> decltype(RowLoss<V>::statistics) {
  const auto if_any = [&](const V& x) { return if_distribution(others, x); };
  return {if_any(others.largest), if_any(others.sum + target_exp), if_any(others.sum),
          if_any(others.masses)};
}

// `below` is others.reference − target.z. It is not used for rows without a target. Callers whose
// others.reference is a rounded number compute `below` from the unrounded reference.
template <typename V, typename Terms>
AMPFUSE_HOST_DEVICE RowLoss<V> row_loss(const RowPartial<V>& others, const RowTarget<V>& target,
                                        V below, const Terms& terms) {
  using L = Lane<V>;
  if (!target.exists) below = V(0);
  const V target_exp = target_exponential(target, below);
  const V sum = others.sum + target_exp;
  // One log1p serves both cases. log(sum) is taken as log1p(sum − 1): `sum` is above 1/2, so this
  // adds no more error than the rounding of `sum` itself.
  const auto is_sure = others.sum < target_exp;
  const V log = L::log1p(L::choose(is_sure, others.sum / target_exp, sum - V(1)));
  const V log_sum = L::choose(is_sure, log - below, log);
  const V lse = others.reference + log_sum;
  V loss = others.spread + times_or_zero(others.masses, log_sum);
  if (target.exists) loss = loss + target.mass * L::choose(is_sure, log, below + log);
  if (terms.z_loss != 0) loss = loss + V(terms.z_loss) * lse * lse;
  // log p = −(reference − z) − log_sum
  const V entropy = log_sum + (others.entropy + times_or_zero(target_exp, below)) / sum;
  const auto if_any = [&](const V& x) { return if_distribution(others, x); };
  return {if_any(loss), if_any(lse), if_any(entropy), row_statistics(others, target_exp)};
}

template <typename V, typename Terms>
AMPFUSE_HOST_DEVICE RowLoss<V> row_loss(const RowPartial<V>& others, const RowTarget<V>& target,
                                        const Terms& terms) {
  return row_loss(others, target, others.reference - target.z, terms);
}

// Returns the scale to multiply into a gradient before backward is called: `grad_scale`, or 1 if
// that is 0 or not finite, since backward divides by the result. If |scale / divisor| would exceed
// `limit`, the scale is lowered by powers of two.
AMPFUSE_HOST_DEVICE float baked_scale(float grad_scale, double divisor, float limit) {
  const float scale = is_finite(grad_scale) && grad_scale != 0 ? grad_scale : 1.0f;
  const float factor = std::fabs(scale / static_cast<float>(divisor));
  if (!(factor > limit) || !is_finite(factor)) return scale;
  return std::ldexp(scale, -1 - std::ilogb(factor / limit));
}

// Returns total / divisor; NaN for a divisor of 0 (the mean of targets of weight 0), as torch does.
AMPFUSE_HOST_DEVICE double reduced_loss(double total, double divisor) {
  return divisor == 0 ? NAN : total / divisor;
}

// Coefficients of the gradient of a row, multiplied by `scale`. The gradient is `of_target` for the
// target class and of_exponential·exp(z − reference) − scale·B for every other class.
template <typename V>
struct RowGradient {
  V of_exponential;
  V scale;
  V of_target;
};

template <typename V, typename S, typename Terms>
AMPFUSE_HOST_DEVICE RowGradient<V> row_gradient(const Statistics<S>& row, V reference,
                                                V target_mass, const Terms& terms, V scale) {
  const V sum = static_cast<V>(row.sum);
  V other_masses = static_cast<V>(row.masses);
  if (terms.z_loss != 0) {
    other_masses = other_masses + V(2 * terms.z_loss) * (reference + Lane<V>::log(sum));
  }
  const V all = target_mass + other_masses;
  const V of_others = static_cast<V>(row.others) / sum;
  return {all / sum * scale, scale, (other_masses - all * of_others) * scale};
}

// z of a logit x, and the derivative dz/dx = 1 − tanh²(u) with u = x / softcap. The derivative is
// computed as 4w/(1 + w)² with w = exp(−2|u|), which has no cancellation.
template <typename V, typename T>
AMPFUSE_HOST_DEVICE V softcapped(V x, T softcap) {
  using L = Lane<V>;
  return softcap == 0 ? x : L::product(V(softcap), L::tanh(x / V(softcap)));
}
template <typename V, typename T>
AMPFUSE_HOST_DEVICE V softcap_slope(V x, T softcap) {
  const V w = Lane<V>::exp(V(-2) * Lane<V>::abs(x / V(softcap)));
  return V(4) * w / ((V(1) + w) * (V(1) + w));
}

}  // namespace ampfuse::math
