// A reference for cross-entropy in long double, and checks of batches against it.
#pragma once

#include <algorithm>

#include "cross_entropy_on_host.h"

#include "catch.h"

// The results of a row in long double, by the formulae of torch.nn.functional.cross_entropy.
struct Exact {
  long double loss = 0;
  long double lse = 0;
  long double entropy = 0;
  int64_t argmax = 0;
  std::vector<long double> gradient;
  std::vector<long double> largest_term;

  Exact(const Batch& batch, const std::vector<double>& logits, int64_t row)
      : gradient(batch.classes), largest_term(batch.classes) {
    const Options& options = batch.options;
    const int classes = batch.classes;
    const bool is_ignored = !options.probabilities && batch.targets[row] == options.ignore_index();
    std::vector<long double> z(classes);
    std::vector<long double> slope(classes, 1);
    for (int c = 0; c < classes; ++c) {
      const long double x = logits[row * classes + c];
      if (x > logits[row * classes + argmax]) argmax = c;
      const long double t = options.softcap == 0 ? 0 : std::tanh(x / options.softcap);
      z[c] = options.softcap == 0 ? x : options.softcap * t;
      slope[c] = 1 - t * t;
    }
    // Subtracting the largest z is exact, and keeps exponentials in range.
    const long double largest = *std::max_element(z.begin(), z.end());
    long double sum = 0;
    for (const long double x : z) sum += std::exp(x - largest);
    const long double log_sum = std::log(sum);
    lse = largest + log_sum;
    long double all = 0;
    std::vector<long double> mass(classes);
    std::vector<long double> p(classes);
    for (int c = 0; c < classes; ++c) {
      const long double minus_log = (largest - z[c]) + log_sum;
      p[c] = std::exp(-minus_log);
      if (p[c] > 0) entropy += p[c] * minus_log;
      const long double q =
          options.probabilities ? batch.probability(row, c) : batch.targets[row] == c;
      mass[c] = (1 - options.label_smoothing) * q + options.label_smoothing / classes;
      if (options.weighted) mass[c] *= batch.weight[c];
      if (mass[c] != 0) loss += mass[c] * minus_log;
      all += mass[c];
    }
    loss += options.z_loss * lse * lse;
    all += 2 * options.z_loss * lse;
    const long double factor = batch.baked / batch.divisor;
    for (int c = 0; c < classes; ++c) {
      gradient[c] = is_ignored ? 0 : (all * p[c] - mass[c]) * factor * slope[c];
      largest_term[c] = (all * p[c] + mass[c]) * factor;
    }
    if (is_ignored) loss = 0;
  }

  // Returns the number of elements of a row's gradient that are not right. The error may be one
  // unit of the last place. Double logits are computed in double, with no wider type, so z − m is
  // rounded. The exponential of a float logit is rounded to float before it is multiplied; that of
  // a QuickFloat is 0 below 2⁻¹²⁶.
  int gradient_misses(const Batch& batch, int64_t row, long double of_terms) const {
    const Type type = batch.grad.type;
    const int quick = batch.options.quick_ulps;
    const long double ulps = type == kDouble ? 100 : type != kFloat ? 1 : quick > 0 ? quick : 1.6L;
    const long double least = quick > 0 ? 0x1p-125L * std::fabs(batch.baked / batch.divisor) : 0;
    int misses = 0;
    for (int c = 0; c < batch.classes; ++c) {
      const long double allowed =
          least + last_place(type, gradient[c]) * ulps + of_terms * largest_term[c];
      misses += !(std::fabs(batch.gradient_of(row, c) - gradient[c]) <= allowed);
    }
    return misses;
  }
};

// Checks all results of a batch that had these logits.
inline void check(const Batch& batch, const std::vector<double>& logits) {
  const long double unit = batch.losses.type == kDouble ? 1e-14L : 1e-6L;
  constexpr long double kReference = 1e-17L;  // error of long double itself
  long double total = 0;
  int misses = 0;
  for (int64_t row = 0; row < batch.rows; ++row) {
    const Exact exact(batch, logits, row);
    total += exact.loss;
    const auto miss = [](long double got, long double expected, long double allowed) {
      return !(std::fabs(got - expected) <= allowed);  // values that were never written are NaN
    };
    misses += miss(batch.losses[row], exact.loss, unit * (std::fabs(exact.loss) + 1));
    if (batch.options.metrics) {
      misses += miss(batch.lse[row], exact.lse, unit * (std::fabs(exact.lse) + 1));
      misses += miss(batch.entropy[row], exact.entropy, 8 * unit * (exact.entropy + 1));
      misses += batch.argmax[row] != exact.argmax;
    }
    misses += exact.gradient_misses(batch, row, batch.options.is_plain() ? kReference : unit * 2);
  }
  CHECK(misses == 0);
  const long double allowed = unit * (std::fabs(total) + batch.rows) / batch.divisor;
  CHECK(std::fabs(batch.loss[0] - total / batch.divisor) <= allowed + kReference);
}

inline void run_and_check(Batch& batch, Team team) {
  const Options& options = batch.options;
  CAPTURE(simt::schedule().name(), batch.type, team, batch.rows, batch.classes, batch.offset,
          options.in_place, options.kept_pieces.value_or(-1), batch.grad.offset);
  const std::vector<double> logits = batch.dense_logits();
  forward_alone(batch, team);
  check(batch, logits);
}

inline void run_and_check(Type type, Team team, int64_t rows, int classes, int64_t offset,
                          const Options& options) {
  Batch batch(type, rows, classes, offset, options);
  run_and_check(batch, team);
}

// Returns moderate logits, different for each class.
inline double moderate(int64_t row, int c) {
  return 3 * std::sin(0.7 * static_cast<double>(row) + 1.3 * c);
}

// Checks rows whose logits are logit(row, class, target).
template <typename Logit>
void check_logits(Type type, Team team, int64_t rows, int classes, const Logit& logit,
                  const Options& options = {}) {
  Batch batch(type, rows, classes, 1, options);
  batch.set_logits([&](int64_t row, int c) { return logit(row, c, batch.targets[row]); });
  run_and_check(batch, team);
}

// Checks that loss and gradient of one row are NaN, and that those of other rows are finite.
inline void check_row_is_nan(const Batch& batch, int64_t nan_row) {
  for (int64_t row = 0; row < batch.rows; ++row) {
    const auto is_right = [&](double x) {
      return row == nan_row ? std::isnan(x) : std::isfinite(x);
    };
    int misses = !is_right(batch.losses[row]);
    for (int c = 0; c < batch.classes; ++c) misses += !is_right(batch.gradient_of(row, c));
    CAPTURE(row);
    CHECK(misses == 0);
  }
}

// Checks that a row without a distribution is NaN and does not change others.
inline void check_no_distribution(Type type, Team team, int classes, const Options& options = {}) {
  for (const double value : {double(NAN), HUGE_VAL, -HUGE_VAL}) {
    // −∞ everywhere, NaN and ∞ at one class: the first, one inside, the last.
    for (const int at : {0, classes * 3 / 8, classes - 1}) {
      CAPTURE(type, team, value, at);
      Batch batch(type, 5, classes, 1, options);
      for (int c = 0; c < classes; ++c) {
        if (value < 0 || c == at) batch.set_logit(1, c, value);
      }
      if (value > 0 && at != 5) batch.set_logit(1, 5, 40000);
      forward_alone(batch, team);
      check_row_is_nan(batch, 1);
    }
  }
}

// Checks that equal rows give equal bits, each at its own distance from a 16-byte boundary.
inline void check_rows_alike(Type type, Team team, int64_t rows, int classes,
                             const Options& options = {}) {
  CAPTURE(type, team, classes, options.in_place, options.kept_pieces.value_or(-1));
  Batch batch(type, rows, classes, 0, options);
  batch.set_logits([&](int64_t, int c) { return batch.logit(0, c); });
  for (int64_t i = classes; i < batch.probabilities.size; ++i) {
    batch.probabilities.set(i, batch.probabilities[i % classes]);
  }
  std::fill(batch.targets.begin(), batch.targets.end(), batch.targets[0]);
  forward_alone(batch, team);
  const Numbers& grad = batch.gradient();
  int misses = 0;
  for (int64_t row = 1; row < rows; ++row) {
    misses += batch.losses.bits(row, 1) != batch.losses.bits(0, 1);
    misses +=
        std::memcmp(&batch.statistics[row], &batch.statistics[0], sizeof batch.statistics[0]) != 0;
    misses += grad.bits(row * classes, classes) != grad.bits(0, classes);
    if (!options.metrics) continue;
    misses += batch.lse.bits(row, 1) != batch.lse.bits(0, 1);
    misses += batch.entropy.bits(row, 1) != batch.entropy.bits(0, 1);
    misses += batch.argmax[row] != batch.argmax[0];
  }
  CHECK(misses == 0);
}
