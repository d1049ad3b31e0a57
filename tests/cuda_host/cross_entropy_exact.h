// A reference for cross-entropy in long double, and checks of batches against it.
#pragma once

#include <algorithm>

#include "cross_entropy_on_host.h"

#include "catch.h"

// The results of a row in long double, by the formulae of torch.nn.functional.cross_entropy.
template <typename scalar_t>
struct Exact {
  long double loss = 0;
  long double lse = 0;
  long double entropy = 0;
  int64_t argmax = 0;
  std::vector<long double> gradient;
  std::vector<long double> largest_term;

  template <typename grad_t>
  Exact(const Batch<scalar_t, grad_t>& batch, const std::vector<scalar_t>& logits, int64_t row)
      : gradient(batch.classes), largest_term(batch.classes) {
    const Options& options = batch.options;
    const int classes = batch.classes;
    const bool is_ignored = !options.probabilities && batch.targets[row] == options.ignore_index();
    std::vector<long double> z(classes);
    std::vector<long double> slope(classes, 1);
    for (int c = 0; c < classes; ++c) {
      const auto x = static_cast<long double>(static_cast<double>(logits[row * classes + c]));
      if (x > static_cast<double>(logits[row * classes + argmax])) argmax = c;
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
      entropy += p[c] * minus_log;
      const long double q =
          options.probabilities ? batch.probability(row, c) : batch.targets[row] == c;
      mass[c] = (1 - options.label_smoothing) * q + options.label_smoothing / classes;
      if (options.weighted) mass[c] *= batch.weight[c];
      loss += mass[c] * minus_log;
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
};

template <typename scalar_t>
long double last_place(long double x) {
  constexpr int kDigits = std::is_same_v<scalar_t, double>      ? 53
                          : std::is_same_v<scalar_t, float>     ? 24
                          : std::is_same_v<scalar_t, c10::Half> ? 11
                                                                : 8;
  constexpr int kLowest = std::is_same_v<scalar_t, double>      ? -1022
                          : std::is_same_v<scalar_t, c10::Half> ? -14
                                                                : -126;
  const int exponent = x == 0 ? kLowest : std::max(kLowest, std::ilogb(x));
  return std::ldexp(1.0L, exponent - kDigits + 1);
}

// The error that a gradient may have, in units of the last place. Double logits are computed in
// double, with no wider type, so z − m is rounded. The exponential of a float logit is rounded to
// float before it is multiplied.
template <typename grad_t>
constexpr long double kUlps = sizeof(grad_t) == 8   ? 100
                              : sizeof(grad_t) == 4 ? 1.6
                                                    : 1;

template <typename scalar_t, typename grad_t>
void check(Batch<scalar_t, grad_t>& batch, const std::vector<scalar_t>& logits) {
  using acc_t = ampfuse::RowAcc<scalar_t>;
  const long double unit = std::is_same_v<acc_t, double> ? 1e-14L : 1e-6L;
  constexpr long double kReference = 1e-17L;  // error of long double itself
  long double total = 0;
  int misses = 0;
  for (int64_t row = 0; row < batch.rows; ++row) {
    const Exact<scalar_t> exact(batch, logits, row);
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
    for (int c = 0; c < batch.classes; ++c) {
      const auto got = static_cast<double>(batch.gradient_of(row, c));
      const long double allowed =
          last_place<grad_t>(exact.gradient[c]) * kUlps<grad_t> +
          (batch.options.is_plain() ? kReference : unit * 2) * exact.largest_term[c];
      misses += !(std::fabs(got - exact.gradient[c]) <= allowed);
    }
  }
  CHECK(misses == 0);
  const long double allowed = unit * (std::fabs(total) + batch.rows) / batch.divisor;
  CHECK(std::fabs(batch.loss - total / batch.divisor) <= allowed + kReference);
}

// Checks rows whose logits are logit(row, class, target).
template <typename scalar_t, typename Team, ampfuse::RowWork kWork, typename Logit>
void check_logits(int64_t rows, int classes, const Logit& logit, const Options& options) {
  Batch<scalar_t> batch(rows, classes, 1, options);
  batch.set_logits(logit);
  const std::vector<scalar_t> logits = batch.dense_logits();
  forward_on_host<scalar_t, Team, kWork>(batch);
  check(batch, logits);
}

template <typename scalar_t, typename Team, typename grad_t = scalar_t>
void run_and_check(int64_t rows, int classes, int64_t offset, const Options& options) {
  CAPTURE(rows, classes, offset, sizeof(scalar_t));
  Batch<scalar_t, grad_t> batch(rows, classes, offset, options);
  const std::vector<scalar_t> logits = batch.dense_logits();
  using ampfuse::RowWork;
  options.is_plain() ? plain_forward_on_host<scalar_t, Team>(batch)
                     : forward_on_host<scalar_t, Team, RowWork::kGeneral>(batch);
  check(batch, logits);
}

// Checks that loss and gradient of one row are NaN, and that those of other rows are finite.
template <typename scalar_t>
void check_row_is_nan(const Batch<scalar_t>& batch, int64_t nan_row) {
  for (int64_t row = 0; row < batch.rows; ++row) {
    const auto is_right = [&](float x) {
      return row == nan_row ? std::isnan(x) : std::isfinite(x);
    };
    int misses = !is_right(batch.losses[row]);
    for (int c = 0; c < batch.classes; ++c) {
      misses += !is_right(static_cast<float>(batch.gradient_of(row, c)));
    }
    CAPTURE(row);
    CHECK(misses == 0);
  }
}
