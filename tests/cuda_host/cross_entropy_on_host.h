// Batches of logits in host memory, the kernels run over them, and what they should give.
#pragma once

#include "simt/simt.h"

#include "cuda/cross_entropy.cuh"
#include "cuda/cross_entropy_backward.cuh"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <random>
#include <vector>

#include "tensor_lists.h"

inline constexpr int64_t kIgnored = -100;
inline constexpr int kGrid = 2;  // blocks

// What a test asks for beside logits and indices.
struct Options {
  double label_smoothing = 0;
  double z_loss = 0;
  double softcap = 0;
  bool weighted = false;
  bool probabilities = false;
  bool metrics = false;
  bool in_place = false;
  float scale = 64;
  int kept_pieces = 1;  // packs of a row per thread for which there is shared memory

  bool is_plain() const {
    return label_smoothing == 0 && softcap == 0 && !probabilities && !metrics;
  }
};

// Rows of logits in memory that ends where they do and starts `offset` elements behind a boundary.
template <typename scalar_t>
struct Batch {
  int64_t rows;
  int classes;
  Options options;
  FakeTensor<scalar_t> logits;
  std::vector<int64_t> targets;
  std::vector<ampfuse::RowAcc<scalar_t>> weight;
  std::vector<ampfuse::RowAcc<scalar_t>> probabilities;

  // What a launch leaves.
  FakeTensor<scalar_t> grad;
  std::vector<ampfuse::RowAcc<scalar_t>> losses;
  std::vector<double> block_losses;
  std::vector<ampfuse::TargetWeight> weights;
  std::vector<ampfuse::math::RowStatistics> statistics;
  std::vector<ampfuse::RowAcc<scalar_t>> lse;
  std::vector<ampfuse::RowAcc<scalar_t>> entropy;
  std::vector<int64_t> argmax;
  double divisor = NAN;
  float baked = NAN;
  ampfuse::RowAcc<scalar_t> loss = NAN;
  ampfuse::TargetComplaint complaint = {};

  Batch(int64_t rows, int classes, int64_t offset, const Options& options, uint32_t seed = 7)
      : rows(rows),
        classes(classes),
        options(options),
        logits(rows * classes, offset),
        targets(rows),
        grad(rows * classes, offset),
        losses(rows, NAN),
        block_losses(kGrid, NAN),
        weights(2),
        statistics(rows),
        lse(rows),
        entropy(rows),
        argmax(rows) {
    std::mt19937 generator(seed);
    std::normal_distribution<double> normal;
    for (int64_t i = 0; i < rows * classes; ++i) {
      logits.data()[i] = as_element<scalar_t>(3 * normal(generator));
    }
    for (int64_t row = 0; row < rows; ++row) {
      targets[row] = row % 4 == 3 ? kIgnored : int64_t(generator() % classes);
    }
    std::uniform_real_distribution<double> uniform(0.1, 1);
    if (options.weighted) {
      for (int c = 0; c < classes; ++c) weight.push_back(uniform(generator));
    }
    if (options.probabilities) {
      for (int64_t i = 0; i < rows * classes; ++i) {
        probabilities.push_back(uniform(generator) / classes);
      }
    }
  }

  ampfuse::CrossEntropyTable<scalar_t> table() const {
    using acc_t = ampfuse::RowAcc<scalar_t>;
    return {logits.data(),
            classes,
            rows,
            classes,
            options.probabilities ? nullptr : targets.data(),
            ampfuse::IndexType::kLong,
            kIgnored,
            options.weighted ? weight.data() : nullptr,
            options.probabilities ? probabilities.data() : nullptr,
            classes,
            acc_t(1 - options.label_smoothing),
            acc_t(options.label_smoothing / classes),
            ampfuse::RowNumber<scalar_t>(options.z_loss),
            acc_t(options.softcap)};
  }

  scalar_t* gradient() { return options.in_place ? logits.data() : grad.data(); }

  ampfuse::CrossEntropyReduction reduction() {
    const bool has_indices = !options.probabilities;
    return {&options.scale,
            nullptr,
            has_indices ? weights.data() : nullptr,
            has_indices ? static_cast<int>(weights.size()) : 0,
            /*is_mean=*/true,
            &baked,
            &divisor,
            &complaint,
            /*trap=*/false};
  }

  ampfuse::CrossEntropyResults<scalar_t> results() {
    return {losses.data(),
            block_losses.data(),
            statistics.data(),
            gradient(),
            classes,
            options.metrics ? lse.data() : nullptr,
            options.metrics ? entropy.data() : nullptr,
            options.metrics ? argmax.data() : nullptr};
  }
};

template <typename scalar_t, typename Team, ampfuse::RowWork kWork>
void forward_on_host(Batch<scalar_t>& batch) {
  using ampfuse::kThreads;
  if (!batch.options.probabilities) {
    simt::launch(ampfuse::cross_entropy_weigh_kernel<scalar_t>, batch.weights.size(), kThreads, 0,
                 batch.table(), batch.weights.data());
  }
  const int kept = batch.options.kept_pieces * Team::kSize;
  const size_t shared = kept * Team::kTeams * sizeof(ampfuse::Pack<scalar_t>);
  simt::launch(ampfuse::cross_entropy_forward_kernel<scalar_t, Team, kWork>, kGrid, Team::kBlock,
               shared, batch.table(), batch.reduction(), batch.results(), kept);
  simt::launch(ampfuse::cross_entropy_finish_kernel<ampfuse::RowAcc<scalar_t>>, 1, kThreads, 0,
               batch.block_losses.data(), kGrid, &batch.divisor, &batch.loss);
}

// A row in long double, by the formulae of torch.nn.functional.cross_entropy.
template <typename scalar_t>
struct Exact {
  long double loss = 0;
  long double lse = 0;
  long double entropy = 0;
  int64_t argmax = 0;
  std::vector<long double> gradient;
  std::vector<long double> largest_term;

  Exact(const Batch<scalar_t>& batch, const std::vector<scalar_t>& logits, int64_t row)
      : gradient(batch.classes), largest_term(batch.classes) {
    const Options& options = batch.options;
    const int classes = batch.classes;
    const bool is_ignored = !options.probabilities && batch.targets[row] == kIgnored;
    std::vector<long double> z(classes);
    std::vector<long double> slope(classes, 1);
    for (int c = 0; c < classes; ++c) {
      const auto x = static_cast<long double>(static_cast<double>(logits[row * classes + c]));
      if (x > static_cast<double>(logits[row * classes + argmax])) argmax = c;
      const long double t = options.softcap == 0 ? 0 : std::tanh(x / options.softcap);
      z[c] = options.softcap == 0 ? x : options.softcap * t;
      slope[c] = 1 - t * t;
    }
    long double sum = 0;
    for (const long double x : z) sum += std::exp(x);
    lse = std::log(sum);
    long double all = 0;
    std::vector<long double> share(classes);
    for (int c = 0; c < classes; ++c) {
      entropy -= std::exp(z[c] - lse) * (z[c] - lse);
      const long double q =
          options.probabilities ? batch.probabilities[row * classes + c] : batch.targets[row] == c;
      share[c] = (1 - options.label_smoothing) * q + options.label_smoothing / classes;
      if (options.weighted) share[c] *= batch.weight[c];
      loss += share[c] * (lse - z[c]);
      all += share[c];
    }
    loss += options.z_loss * lse * lse;
    all += 2 * options.z_loss * lse;
    const long double factor = batch.baked / batch.divisor;
    for (int c = 0; c < classes; ++c) {
      const long double p = std::exp(z[c] - lse);
      gradient[c] = is_ignored ? 0 : (all * p - share[c]) * factor * slope[c];
      largest_term[c] = (all * p + share[c]) * factor;
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
