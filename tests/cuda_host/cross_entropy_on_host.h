// Batches of logits in host memory, and functions that run the kernels on them.
#pragma once

#include "simt/simt.h"

#include "cuda/cross_entropy.cuh"
#include "cuda/cross_entropy_backward.cuh"

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <optional>
#include <random>
#include <vector>

#include "tensor_lists.h"

inline constexpr int64_t kIgnored = -100;
inline constexpr int kGrid = 2;  // blocks, or clusters

// The teams that process a row.
using ampfuse::WarpTeam;
using FewLanes = ampfuse::LaneTeam<8>;
using SmallBlock = ampfuse::BlockTeam<64>;
using BlockTeam = ampfuse::BlockTeam<256>;
using WideTeam = ampfuse::BlockTeam<512>;
using WidestTeam = ampfuse::BlockTeam<1024>;

// Options of a test, in addition to logits and indices.
struct Options {
  double label_smoothing = 0;
  double z_loss = 0;
  double softcap = 0;
  bool weighted = false;
  bool probabilities = false;
  bool metrics = false;
  bool in_place = false;
  float scale = 64;
  float limit = INFINITY;  // upper bound of |scale / divisor|
  int kept_pieces = 1;     // packs of a row per thread that fit in shared memory
  int cluster_blocks = 1;
  int64_t padding = 0;    // elements between rows of logits
  int64_t positions = 0;  // per batch entry; 0 if the classes of a row are contiguous
  std::optional<int64_t> grad_offset = {};  // if it differs from the offset of logits
  ampfuse::IndexType index_type = ampfuse::IndexType::kLong;

  int64_t ignore_index() const { return index_type == ampfuse::IndexType::kByte ? 255 : kIgnored; }

  bool is_plain() const {
    return label_smoothing == 0 && softcap == 0 && !probabilities && !metrics;
  }
};

// Returns copies of `given`, each with one or two more features of a loss.
inline std::vector<Options> each_by_itself(const Options& given) {
  std::vector<Options> all(5, given);
  all[0].weighted = true;
  all[1].label_smoothing = 0.1;
  all[2].probabilities = true;
  all[2].weighted = true;
  all[3].z_loss = 1e-3;
  all[3].softcap = 20;
  all[4].metrics = true;
  return all;
}

// Rows of logits. Their allocation ends with the last row, and they start `offset` elements after a
// 16-byte boundary. If options.positions is set, `rows` must be a multiple of it.
template <typename scalar_t, typename grad_t = scalar_t>
struct Batch {
  int64_t rows;
  int classes;
  Options options;
  int64_t stride;
  FakeTensor<scalar_t> logits;
  std::vector<int64_t> targets;
  std::vector<ampfuse::RowAcc<scalar_t>> weight;
  std::vector<ampfuse::RowAcc<scalar_t>> probabilities;

  // Results of a launch.
  FakeTensor<grad_t> grad;
  std::vector<ampfuse::RowAcc<scalar_t>> losses;
  std::vector<double> block_losses;
  unsigned finished = 7;  // which a kernel must set to 0 first
  std::vector<ampfuse::TargetWeight> weights;
  std::vector<ampfuse::math::RowStatistics> statistics;
  std::vector<ampfuse::RowAcc<scalar_t>> lse;
  std::vector<ampfuse::RowAcc<scalar_t>> entropy;
  std::vector<int64_t> argmax;
  double divisor = NAN;
  float baked = NAN;
  ampfuse::RowAcc<scalar_t> loss = NAN;
  ampfuse::BadTarget bad_target = {};

  Batch(int64_t rows, int classes, int64_t offset, const Options& options, uint32_t seed = 7)
      : rows(rows),
        classes(classes),
        options(options),
        stride(classes + options.padding),
        logits(rows * stride - options.padding, offset),
        targets(rows),
        grad(rows * classes, options.grad_offset.value_or(offset)),
        losses(rows, NAN),
        block_losses(blocks(), NAN),
        weights(2),
        statistics(rows),
        lse(rows),
        entropy(rows),
        argmax(rows) {
    std::mt19937 generator(seed);
    std::normal_distribution<double> normal;
    std::fill_n(logits.data(), logits.size, as_element<scalar_t>(NAN));
    for (int64_t row = 0; row < rows; ++row) {
      for (int c = 0; c < classes; ++c) logit(row, c) = as_element<scalar_t>(3 * normal(generator));
    }
    for (int64_t row = 0; row < rows; ++row) {
      targets[row] = row % 4 == 3 ? options.ignore_index() : int64_t(generator() % classes);
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

  // Returns the number of blocks of the forward kernel.
  int blocks() const { return kGrid * options.cluster_blocks; }

  scalar_t* row_of(int64_t row) const { return logits.data() + row * stride; }

  // Returns the index of a class of a row in memory: `row_stride` is the distance between rows, if
  // options.positions is not set.
  int64_t index(int64_t row, int c, int64_t row_stride) const {
    const int64_t positions = options.positions;
    if (positions == 0) return row * row_stride + c;
    return (row / positions * classes + c) * positions + row % positions;
  }
  scalar_t& logit(int64_t row, int c) const { return logits.data()[index(row, c, stride)]; }
  grad_t gradient_of(int64_t row, int c) const {
    return gradient()[index(row, c, options.in_place ? stride : classes)];
  }
  ampfuse::RowAcc<scalar_t> probability(int64_t row, int c) const {
    return probabilities[index(row, c, classes)];
  }

  ampfuse::RowsAt rows_at(int64_t row_stride) const {
    if (options.positions > 0)
      return {classes * options.positions, options.positions, options.positions};
    return {row_stride, 1, 1};
  }

  // Sets every logit to value(row, class, target).
  template <typename Value>
  void set_logits(const Value& value) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int c = 0; c < classes; ++c) {
        logit(row, c) = as_element<scalar_t>(value(row, c, targets[row]));
      }
    }
  }

  // Copies the first row to all rows.
  void repeat_first_row() {
    for (int64_t row = 1; row < rows; ++row) {
      std::copy_n(logits.data(), classes, row_of(row));
      targets[row] = targets[0];
      if (options.probabilities) {
        std::copy_n(probabilities.begin(), classes, probabilities.begin() + row * classes);
      }
    }
  }

  // Returns the logits without padding between rows.
  std::vector<scalar_t> dense_logits() const {
    std::vector<scalar_t> dense;
    for (int64_t row = 0; row < rows; ++row) {
      for (int c = 0; c < classes; ++c) dense.push_back(logit(row, c));
    }
    return dense;
  }

  // Returns the targets in the type that options.index_type names.
  const void* indices() {
    const auto converted = [&]<typename T>(std::vector<T>& into) {
      into.assign(targets.begin(), targets.end());
      return static_cast<const void*>(into.data());
    };
    if (options.index_type == ampfuse::IndexType::kInt) return converted(ints_);
    if (options.index_type == ampfuse::IndexType::kByte) return converted(bytes_);
    return targets.data();
  }

  ampfuse::CrossEntropyTable<scalar_t> table() {
    using acc_t = ampfuse::RowAcc<scalar_t>;
    return {logits.data(),
            rows_at(stride),
            rows,
            classes,
            options.probabilities ? nullptr : indices(),
            options.index_type,
            options.ignore_index(),
            options.weighted ? weight.data() : nullptr,
            options.probabilities ? probabilities.data() : nullptr,
            rows_at(classes),
            {acc_t(1 - options.label_smoothing), acc_t(options.label_smoothing / classes),
             ampfuse::RowNumber<scalar_t>(options.z_loss), acc_t(options.softcap)}};
  }

  grad_t* gradient() const {
    if constexpr (std::is_same_v<grad_t, scalar_t>) {
      if (options.in_place) return logits.data();
    }
    return grad.data();
  }

  ampfuse::CrossEntropyReduction reduction() {
    const bool has_indices = !options.probabilities;
    return {&options.scale,
            nullptr,
            has_indices ? weights.data() : nullptr,
            has_indices ? static_cast<int>(weights.size()) : 0,
            /*is_mean=*/true,
            options.limit,
            &baked,
            &divisor,
            &bad_target,
            /*trap=*/false};
  }

  ampfuse::CrossEntropyResults<scalar_t, grad_t> results() {
    return {losses.data(),
            {&loss, block_losses.data(), &finished},
            statistics.data(),
            gradient(),
            rows_at(options.in_place ? stride : classes),
            options.metrics ? lse.data() : nullptr,
            options.metrics ? entropy.data() : nullptr,
            options.metrics ? argmax.data() : nullptr};
  }

 private:
  std::vector<int32_t> ints_;
  std::vector<uint8_t> bytes_;
};

template <typename scalar_t, typename Team, ampfuse::RowWork kWork, typename grad_t>
void forward_on_host(Batch<scalar_t, grad_t>& batch,
                     const ampfuse::CrossEntropyResults<scalar_t, grad_t>& results) {
  using ampfuse::kThreads;
  if (batch.options.probabilities) {
    batch.finished = 0;
  } else {
    simt::launch(ampfuse::cross_entropy_weigh_kernel<scalar_t>, batch.weights.size(), kThreads, 0,
                 batch.table(), batch.weights.data(), &batch.finished);
  }
  // With kHeld, all packs of a row fit in shared memory.
  const int pieces = kWork == ampfuse::RowWork::kHeld ? ampfuse::HeldRow<scalar_t, Team>::kPacks
                                                      : batch.options.kept_pieces;
  const int kept = pieces * Team::kSize;
  const size_t shared = kept * Team::kTeams * sizeof(ampfuse::Pack<scalar_t>);
  simt::launch_clusters(ampfuse::cross_entropy_forward_kernel<scalar_t, Team, kWork, grad_t>,
                        batch.blocks(), batch.options.cluster_blocks, Team::kBlock, shared,
                        batch.table(), batch.reduction(), results, kept);
}

template <typename scalar_t, typename Team, ampfuse::RowWork kWork, typename grad_t>
void forward_on_host(Batch<scalar_t, grad_t>& batch) {
  forward_on_host<scalar_t, Team, kWork>(batch, batch.results());
}

// Runs the kernel that a plain loss takes: rows of 16-bit logits that fit are held in registers.
template <typename scalar_t, typename Team, typename grad_t>
void plain_forward_on_host(Batch<scalar_t, grad_t>& batch) {
  if constexpr (sizeof(scalar_t) == 2 && Team::kSize > 1) {
    if (batch.classes <= ampfuse::HeldRow<scalar_t, Team>::kMostClasses) {
      return forward_on_host<scalar_t, Team, ampfuse::RowWork::kHeld>(batch);
    }
  }
  forward_on_host<scalar_t, Team, ampfuse::RowWork::kPlain>(batch);
}
