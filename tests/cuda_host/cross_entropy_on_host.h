// Batches of logits in host memory, and functions that run the kernels of cross_entropy on them.
// cross_entropy_kernels.cpp and cross_entropy_other_kernels.cpp compile the kernels for all tests.
#pragma once

#include "simt/simt.h"

#include "cuda/cross_entropy_row.cuh"
#include "math/cross_entropy_shards.h"

#include <cmath>
#include <optional>
#include <random>
#include <string>
#include <vector>

#include "numbers.h"

inline constexpr int64_t kIgnored = -100;
inline constexpr int kGrid = 2;  // blocks

// The threads that process a row, by their number.
enum class Team {
  kPosition = 1,
  kFewLanes = 8,
  kHalfWarp = 16,
  kWarp = 32,
  kBlock64 = 64,
  kBlock128 = 128,
  kBlock = 256,
  kWide = 512,
  kWidest = 1024
};

// Returns the most 16-bit logits that the threads of a team hold.
constexpr int most_held(Team team, ampfuse::RowWork work = ampfuse::RowWork::kHeld) {
  return (work == ampfuse::RowWork::kHeldTwice ? 64 : 32) * static_cast<int>(team);
}

enum class Result { kGrad, kStatistics, kRowLosses, kLoss };

// Options of a test, in addition to logits and indices.
struct Options {
  double label_smoothing = 0;
  double z_loss = 0;
  double softcap = 0;
  bool weighted = false;
  bool probabilities = false;
  bool metrics = false;
  bool in_place = false;
  int quick_ulps = 0;  // not 0: the variant quick_floats, with this error of a gradient
  float scale = 64;
  float limit = INFINITY;               // upper bound of |scale / divisor|
  std::optional<int> kept_pieces = {};  // packs of a row per thread that fit in shared memory
  int64_t padding = 0;                  // elements between rows of logits
  int64_t positions = 0;                // per batch entry; 0 if the classes of a row are contiguous
  std::optional<int64_t> grad_offset = {};  // if it differs from the offset of logits
  std::optional<Type> grad_type = {};       // if it differs from the type of logits
  ampfuse::IndexType index_type = ampfuse::IndexType::kLong;
  std::optional<ampfuse::RowWork> work = {};  // if it is not that of the loss
  std::optional<Result> without = {};         // a result that is not asked for

  int64_t ignore_index() const { return index_type == ampfuse::IndexType::kByte ? 255 : kIgnored; }

  bool is_plain() const {
    return label_smoothing == 0 && softcap == 0 && !probabilities && !metrics;
  }
};

// Returns copies of `given`, each with one or two more features of a loss, and one with all.
inline std::vector<Options> with_features(const Options& given) {
  std::vector<Options> all(6, given);
  for (const size_t i : {1, 5}) all[i].label_smoothing = 0.1;
  for (const size_t i : {3, 5}) all[i].z_loss = 1e-3;
  for (const size_t i : {3, 5}) all[i].softcap = 20;
  for (const size_t i : {0, 2, 5}) all[i].weighted = true;
  for (const size_t i : {2, 5}) all[i].probabilities = true;
  for (const size_t i : {4, 5}) all[i].metrics = true;
  return all;
}

// Rows of logits. Their allocation ends with the last row, and they start `offset` elements after a
// 16-byte boundary. If options.positions is set, `rows` must be a multiple of it.
struct Batch {
  Type type;
  int64_t rows;
  int classes;
  int64_t offset;
  Options options;
  int64_t stride = classes + options.padding;
  Numbers logits{type, rows * stride - options.padding, offset};
  std::vector<int64_t> targets = std::vector<int64_t>(rows);
  Numbers weight{arithmetic_of(type), options.weighted ? classes : 0};
  Numbers probabilities{arithmetic_of(type), options.probabilities ? rows * classes : 0};

  // Results of a launch.
  Numbers grad{options.grad_type.value_or(type), rows * classes,
               options.grad_offset.value_or(offset)};
  Numbers losses{arithmetic_of(type), rows};
  std::vector<double> block_losses = std::vector<double>(kGrid, NAN);
  unsigned finished = 7;  // which a kernel must set to 0 first
  std::vector<ampfuse::TargetWeight> weights = std::vector<ampfuse::TargetWeight>(2);
  std::vector<ampfuse::math::RowStatistics> statistics =
      std::vector<ampfuse::math::RowStatistics>(rows);
  Numbers lse{arithmetic_of(type), rows};
  Numbers entropy{arithmetic_of(type), rows};
  std::vector<int64_t> argmax = std::vector<int64_t>(rows);
  double divisor = NAN;
  float baked = NAN;
  Numbers loss{arithmetic_of(type), 1};
  ampfuse::BadTarget bad_target = {};

  Batch(Type type, int64_t rows, int classes, int64_t offset = 0, const Options& options = {})
      : type(type), rows(rows), classes(classes), offset(offset), options(options) {
    std::mt19937 generator(7);
    std::normal_distribution<double> normal;
    set_logits([&](int64_t, int) { return 3 * normal(generator); });
    for (int64_t row = 0; row < rows; ++row) {
      targets[row] = row % 4 == 3 ? options.ignore_index() : int64_t(generator() % classes);
    }
    std::uniform_real_distribution<double> uniform(0.1, 1);
    for (int64_t c = 0; c < weight.size; ++c) weight.set(c, uniform(generator));
    for (int64_t i = 0; i < probabilities.size; ++i) {
      probabilities.set(i, uniform(generator) / classes);
    }
  }

  // Returns the index of a class of a row in memory: `row_stride` is the distance between rows, if
  // options.positions is not set.
  int64_t index(int64_t row, int c, int64_t row_stride) const {
    const int64_t positions = options.positions;
    if (positions == 0) return row * row_stride + c;
    return (row / positions * classes + c) * positions + row % positions;
  }
  double logit(int64_t row, int c) const { return logits[index(row, c, stride)]; }
  void set_logit(int64_t row, int c, double x) { logits.set(index(row, c, stride), x); }
  double probability(int64_t row, int c) const { return probabilities[index(row, c, classes)]; }

  const Numbers& gradient() const { return options.in_place ? logits : grad; }
  int64_t gradient_stride() const { return options.in_place ? stride : classes; }
  double gradient_of(int64_t row, int c) const {
    return gradient()[index(row, c, gradient_stride())];
  }

  ampfuse::RowsAt rows_at(int64_t row_stride) const {
    if (options.positions > 0)
      return {classes * options.positions, options.positions, options.positions};
    return {row_stride, 1, 1};
  }

  // Sets every logit to value(row, class).
  template <typename Value>
  void set_logits(const Value& value) {
    for (int64_t row = 0; row < rows; ++row) {
      for (int c = 0; c < classes; ++c) set_logit(row, c, value(row, c));
    }
  }

  // Returns the logits without padding between rows.
  std::vector<double> dense_logits() const {
    std::vector<double> dense;
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

  template <typename scalar_t>
  ampfuse::CrossEntropyTable<scalar_t> table() {
    using acc_t = ampfuse::RowAcc<scalar_t>;
    return {logits.at<scalar_t>(),
            rows_at(stride),
            rows,
            classes,
            options.probabilities ? nullptr : indices(),
            options.index_type,
            options.ignore_index(),
            options.weighted ? weight.at<acc_t>() : nullptr,
            options.probabilities ? probabilities.at<acc_t>() : nullptr,
            rows_at(classes),
            {acc_t(1 - options.label_smoothing), acc_t(options.label_smoothing / classes),
             ampfuse::RowNumber<scalar_t>(options.z_loss), acc_t(options.softcap)}};
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

 private:
  std::vector<int32_t> ints_;
  std::vector<uint8_t> bytes_;
};

// The kernel for a batch.
struct Chosen {
  Type type;
  Type grad_type;
  ampfuse::RowWork work;
  Team team;
};

// Calls launch.operator()<scalar_t, grad_t, RowTeam, kWork>() if the chosen kernel is that of one
// of these teams. Otherwise returns false.
template <typename scalar_t, typename grad_t, ampfuse::RowWork kWork, typename... Teams,
          typename Launch>
bool is_launched(const Chosen& chosen, const Launch& launch) {
  if (chosen.type != kTypeOf<scalar_t> || chosen.grad_type != kTypeOf<grad_t>) return false;
  const auto is_of_team = [&]<typename RowTeam>() {
    if (chosen.team != Team{RowTeam::kSize}) return false;
    launch.template operator()<scalar_t, grad_t, RowTeam, kWork>();
    return true;
  };
  return chosen.work == kWork && (is_of_team.template operator()<Teams>() || ...);
}

// Runs the kernel that sums the weights of targets, for bfloat16 or float logits.
void weigh(Batch& batch);

// Runs the forward kernel after `weigh`. A plain loss of 16-bit logits holds rows that fit in
// registers.
void forward(Batch& batch, Team team);

// Runs the forward kernel after the host has computed what `weigh` does: the tests of forward take
// half the time.
inline void forward_alone(Batch& batch, Team team) {
  batch.finished = 0;
  batch.weights.assign(2, {0, batch.rows});
  for (int64_t row = 0; row < batch.rows; ++row) {
    const int64_t target = batch.targets[row];
    if (target == batch.options.ignore_index()) continue;
    batch.weights[row % 2].weight += batch.options.weighted ? batch.weight[target] : 1;
  }
  forward(batch, team);
}

// Runs cross_entropy_total_kernel, which only adds up what `weigh` has written.
void total(Batch& batch);

// The classes from `first` to `last`, excluding `last`, of all rows of a batch.
struct Shard {
  int first;
  int classes;
  std::vector<int64_t> targets;

  Shard(const Batch& batch, int first, int last) : first(first), classes(last - first) {
    for (const int64_t target : batch.targets) {
      const bool is_here = target >= first && target < last;
      const int64_t here = is_here ? target - first : ampfuse::math::kElsewhere;
      targets.push_back(target == batch.options.ignore_index() ? -1 : here);
    }
  }
};

// Writes to `grad` the gradient that backward computes from the statistics of forward, for all
// classes or for those of a shard.
void backward(Batch& batch, Team team, const Numbers& grad, const Shard* shard = nullptr);

// Computes the partial sums of the classes of a shard.
void reduce_shard(Batch& batch, Team team, const Shard& shard,
                  ampfuse::math::ShardPartial* partials, int64_t* argmax);

// Writes the results of rows over all classes, from the partial sums of `shards` shards.
void join_shards(Batch& batch, const Shard& shard, const ampfuse::math::ShardPartial* partials,
                 int shards, int64_t all_classes, double* losses);

// Runs the kernel that multiplies a bfloat16 gradient by upstream / baked, `count` elements a warp.
void rescale(const Numbers& grad, int count, float baked, float upstream);
