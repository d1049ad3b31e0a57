// Cross-entropy of one row of logits, and its gradient.
//
//   z = softcap·tanh(x / softcap), or the logit x itself
//   lse = log Σ exp z,  p = exp(z − lse)
//   loss = Σ B·(lse − z) + z_loss·lse²          B: what each class weighs, w·q
//   ∂loss/∂z = A·p − B,  A = Σ B + 2·z_loss·lse
//
// q is the target distribution: for an index y with label smoothing ε it is 1 − ε + ε/V at y and
// ε/V elsewhere. For a row that is sure of its target all of this would be small differences of
// large numbers. So y's own terms are kept out of the sums over classes, which are then over the
// others: with e = exp(z − m), m near the largest z, and s the sum of the others' e,
//
//   lse − z_y = log(1 + s/e_y) where that is the larger, else (m − z_y) + log(e_y + s)
//   ∂loss/∂z_y = A·p_y − B_y = (A − B_y) − A·s/(e_y + s),  A − B_y = Σ others' B + 2·z_loss·lse
#pragma once

#include <cmath>
#include <cstdint>

#include "host_device.h"
#include "lane.h"

namespace ampfuse::math {

template <typename T>
AMPFUSE_HOST_DEVICE T minus_infinity() {
  return static_cast<T>(-HUGE_VAL);
}

// What some classes of a row tell about it, the row's own target left out but for `largest`.
template <typename T>
struct RowPart {
  T largest = minus_infinity<T>();  // z
  T reference = 0;                  // near to it: what sums are relative to (exponential.h)
  T sum = 0;                        // of exp(z − reference)
  T shares = 0;                     // of B
  T spread = 0;                     // of B·(reference − z)
  T entropy = 0;                    // of exp(z − reference)·(reference − z)
};

// x·y where nothing times infinity is nothing.
template <typename T>
AMPFUSE_HOST_DEVICE T times_or_zero(T x, T y) {
  return x == 0 ? 0 : x * y;
}

// The same of classes of both.
template <typename T>
AMPFUSE_HOST_DEVICE RowPart<T> join(const RowPart<T>& a, const RowPart<T>& b) {
  const bool b_is_above = b.largest > a.largest || b.largest != b.largest;
  RowPart<T> both = b_is_above ? b : a;
  const RowPart<T>& other = b_is_above ? a : b;
  both.shares += other.shares;
  // Nothing but −∞ has no exponentials, and no reference either.
  const bool is_nothing = other.largest == minus_infinity<T>();
  const T below = is_nothing ? 0 : both.reference - other.reference;
  both.spread += other.spread + times_or_zero(other.shares, below);
  if (is_nothing) return both;
  const T factor = below == 0 ? 1 : std::exp(-below);
  both.sum += other.sum * factor;
  both.entropy += (other.entropy + times_or_zero(other.sum, below)) * factor;
  return both;
}

// A row's own target.
template <typename T>
struct RowTarget {
  bool exists = false;  // not where targets are distributions
  T z = 0;
  T share = 0;  // its B
};

// What backward needs to know of a row.
struct RowStatistics {
  double largest;
  double sum;     // of all exp(z − reference)
  double others;  // of those that are not the target's
  double shares;  // of the others' B
};
inline constexpr int kRowStatistics = sizeof(RowStatistics) / sizeof(double);

template <typename T>
struct RowLoss {
  T loss;
  T lse;
  T entropy;  // −Σ p·log p
  RowStatistics statistics;
};

template <typename T>
AMPFUSE_HOST_DEVICE RowLoss<T> row_loss(const RowPart<T>& others, const RowTarget<T>& target,
                                        T z_loss) {
  // Infinities leave no distribution, nor does a row of nothing but −∞.
  if (!is_finite(others.largest)) {
    const T nan = NAN;
    return {nan, nan, nan, {nan, nan, nan, nan}};
  }
  const T below = target.exists ? others.reference - target.z : 0;
  const T targets = target.exists ? std::exp(-below) : 0;
  const T sum = others.sum + targets;
  const T log_sum = std::log(sum);
  const T lse = others.reference + log_sum;
  T loss = others.spread + times_or_zero(others.shares, log_sum);
  if (target.exists) {
    const bool is_sure = others.sum < targets;
    loss += target.share * (is_sure ? std::log1p(others.sum / targets) : below + log_sum);
  }
  if (z_loss != 0) loss += z_loss * lse * lse;
  // log p = −(reference − z) − log_sum
  const T entropy = log_sum + (others.entropy + times_or_zero(targets, below)) / sum;
  return {loss, lse, entropy, {others.largest, sum, others.sum, others.shares}};
}

// What backward is expected to be called with: something to divide by.
AMPFUSE_HOST_DEVICE float baked_scale(float wish) {
  return is_finite(wish) && wish != 0 ? wish : 1.0f;
}

// The mean of what weighs nothing is no number, as in torch.
AMPFUSE_HOST_DEVICE double reduced_loss(double total, double divisor) {
  return divisor == 0 ? NAN : total / divisor;
}

// The gradient of a row, times `scale`: of_exponential·exp(z − reference) − scale·B, and apart from
// that formula what the target has.
template <typename T>
struct RowGradient {
  T of_exponential;
  T scale;
  T of_target;
};

template <typename T>
AMPFUSE_HOST_DEVICE RowGradient<T> row_gradient(const RowStatistics& row, T reference,
                                                T target_share, T z_loss, T scale) {
  const T sum = static_cast<T>(row.sum);
  T others = static_cast<T>(row.shares);
  if (z_loss != 0) others += 2 * z_loss * (reference + std::log(sum));
  const T all = target_share + others;
  const T of_others = static_cast<T>(row.others) / sum;
  return {all / sum * scale, scale, (others - all * of_others) * scale};
}

// z of a logit, and how it moves with it. 1 − tanh² of u is 4w/(1 + w)² with w = exp(−2|u|), which
// does not cancel.
template <typename T>
AMPFUSE_HOST_DEVICE T softcapped(T x, T softcap) {
  return softcap == 0 ? x : softcap * std::tanh(x / softcap);
}
template <typename T>
AMPFUSE_HOST_DEVICE T softcap_slope(T x, T softcap) {
  const T w = std::exp(-2 * std::fabs(x / softcap));
  return 4 * w / ((1 + w) * (1 + w));
}

}  // namespace ampfuse::math
