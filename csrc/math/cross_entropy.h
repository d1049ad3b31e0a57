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

AMPFUSE_HOST_DEVICE double minus_infinity() {
  return -HUGE_VAL;
}

// What some classes of a row tell about it, the row's own target left out but for `largest`.
struct RowPart {
  double largest = minus_infinity();  // z
  double reference = 0;               // near to it: what sums are relative to (exponential.h)
  double sum = 0;                     // of exp(z − reference)
  double shares = 0;                  // of B
  double spread = 0;                  // of B·(reference − z)
  double entropy = 0;                 // of exp(z − reference)·(reference − z)
};

// x·y where nothing times infinity is nothing.
AMPFUSE_HOST_DEVICE double times_or_zero(double x, double y) {
  return x == 0 ? 0 : x * y;
}

// The same of classes of both.
AMPFUSE_HOST_DEVICE RowPart join(const RowPart& a, const RowPart& b) {
  const bool b_is_above = b.largest > a.largest || b.largest != b.largest;
  RowPart both = b_is_above ? b : a;
  const RowPart& other = b_is_above ? a : b;
  both.shares += other.shares;
  // Nothing but −∞ has no exponentials, and no reference either.
  const bool is_nothing = other.largest == minus_infinity();
  const double below = is_nothing ? 0 : both.reference - other.reference;
  both.spread += other.spread + times_or_zero(other.shares, below);
  if (is_nothing) return both;
  const double factor = below == 0 ? 1 : std::exp(-below);
  both.sum += other.sum * factor;
  both.entropy += (other.entropy + times_or_zero(other.sum, below)) * factor;
  return both;
}

// A row's own target.
struct RowTarget {
  bool exists = false;  // not where targets are distributions
  double z = 0;
  double share = 0;  // its B
};

// What backward needs to know of a row.
struct RowStatistics {
  double largest;
  double sum;     // of all exp(z − reference)
  double others;  // of those that are not the target's
  double shares;  // of the others' B
};
inline constexpr int kRowStatistics = sizeof(RowStatistics) / sizeof(double);

struct RowLoss {
  double loss;
  double lse;
  double entropy;  // −Σ p·log p
  RowStatistics statistics;
};

AMPFUSE_HOST_DEVICE RowLoss row_loss(const RowPart& others, const RowTarget& target,
                                     double z_loss) {
  // Infinities leave no distribution, nor does a row of nothing but −∞.
  if (!is_finite(others.largest)) {
    const double nan = NAN;
    return {nan, nan, nan, {nan, nan, nan, nan}};
  }
  const double below = target.exists ? others.reference - target.z : 0;
  const double targets = target.exists ? std::exp(-below) : 0;
  const double sum = others.sum + targets;
  const double log_sum = std::log(sum);
  const double lse = others.reference + log_sum;
  double loss = others.spread + times_or_zero(others.shares, log_sum);
  if (target.exists) {
    const bool is_sure = others.sum < targets;
    loss += target.share * (is_sure ? std::log1p(others.sum / targets) : below + log_sum);
  }
  if (z_loss != 0) loss += z_loss * lse * lse;
  // log p = −(reference − z) − log_sum
  const double entropy = log_sum + (others.entropy + times_or_zero(targets, below)) / sum;
  return {loss, lse, entropy, {others.largest, sum, others.sum, others.shares}};
}

// The gradient of a row, times `scale`: of_exponential·exp(z − reference) − scale·B, and apart from
// that formula what the target has.
struct RowGradient {
  double of_exponential;
  double scale;
  double of_target;
};

AMPFUSE_HOST_DEVICE RowGradient row_gradient(const RowStatistics& row, double reference,
                                             double target_share, double z_loss, double scale) {
  double others = row.shares;
  if (z_loss != 0) others += 2 * z_loss * (reference + std::log(row.sum));
  const double all = target_share + others;
  return {all / row.sum * scale, scale, (others - all * (row.others / row.sum)) * scale};
}

// z of a logit, and how it moves with it. 1 − tanh² of u is 4w/(1 + w)² with w = exp(−2|u|), which
// does not cancel.
AMPFUSE_HOST_DEVICE double softcapped(double x, double softcap) {
  return softcap == 0 ? x : softcap * std::tanh(x / softcap);
}
AMPFUSE_HOST_DEVICE double softcap_slope(double x, double softcap) {
  const double w = std::exp(-2 * std::fabs(x / softcap));
  return 4 * w / ((1 + w) * (1 + w));
}

}  // namespace ampfuse::math
