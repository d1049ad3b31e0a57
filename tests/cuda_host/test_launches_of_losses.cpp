// The launches of cross-entropy. They choose teams by the length of rows, and lay out scratch
// memory. Other tests run the kernels alone.
#include "cross_entropy_exact.h"

#include "cuda/cross_entropy_interface.h"

#include "catch.h"
#include "fake_caller.h"

using ampfuse::LogitRows;

namespace {

// Lengths of rows, one for each way to process them: few lanes, a warp, registers, blocks of each
// size, and rows that no block keeps.
constexpr int kLengths[] = {9, 131, 1030, 2500, 9000, 40000};

LogitRows rows_of(Batch& batch) {
  const Options& options = batch.options;
  return {.logits = batch.logits.data(),
          .dtype = dtype_of(batch.type),
          .at = batch.rows_at(batch.stride),
          .are_positions = options.positions > 0,
          .rows = batch.rows,
          .classes = batch.classes,
          .target = options.probabilities ? nullptr : batch.indices(),
          .index_type = options.index_type,
          .ignore_index = options.ignore_index(),
          .weight = options.weighted ? batch.weight.data() : nullptr,
          .probabilities = options.probabilities ? batch.probabilities.data() : nullptr,
          .probabilities_at = batch.rows_at(batch.classes),
          .terms = {1 - options.label_smoothing, options.label_smoothing / batch.classes,
                    options.z_loss, options.softcap},
          .is_shard = false,
          .are_targets_checked = false,
          .bad_target = &batch.bad_target,
          .trap = false};
}

// Computes the losses of rows and the statistics, and then the mean with its gradient.
void launch_forward(Batch& batch) {
  const bool metrics = batch.options.metrics;
  ampfuse::ForwardPointers pointers = {.is_mean = false,
                                       .is_per_row = true,
                                       .gradient_limit = batch.options.limit,
                                       .grad_scale = nullptr,
                                       .denominator = nullptr,
                                       .loss = batch.losses.data(),
                                       .baked_scale = &batch.baked,
                                       .divisor = &batch.divisor,
                                       .statistics = batch.statistics.data(),
                                       .lse = metrics ? batch.lse.data() : nullptr,
                                       .entropy = metrics ? batch.entropy.data() : nullptr,
                                       .argmax = metrics ? batch.argmax.data() : nullptr,
                                       .grad = nullptr,
                                       .grad_dtype = dtype_of(batch.type),
                                       .grad_at = {}};
  FakeCaller caller;
  launch_cross_entropy_forward(caller, rows_of(batch), pointers);
  pointers.is_mean = true;
  pointers.is_per_row = false;
  pointers.grad_scale = &batch.options.scale;
  pointers.loss = batch.loss.data();
  pointers.statistics = nullptr;
  pointers.grad = batch.gradient().data();
  pointers.grad_dtype = dtype_of(batch.gradient().type);
  pointers.grad_at = batch.rows_at(batch.gradient_stride());
  launch_cross_entropy_forward(caller, rows_of(batch), pointers);
}

void launch_backward(Batch& batch) {
  const double upstream = batch.baked;
  const ampfuse::BackwardPointers pointers = {.statistics = batch.statistics.data(),
                                              .divisor = &batch.divisor,
                                              .grad_output = &upstream,
                                              .is_per_row = false,
                                              .grad = batch.grad.data(),
                                              .grad_dtype = dtype_of(batch.grad.type),
                                              .grad_at = batch.rows_at(batch.classes)};
  FakeCaller caller;
  launch_cross_entropy_backward(caller, rows_of(batch), pointers);
}

void check_launches(Type type, int classes, const Options& options) {
  Batch batch(type, options.positions > 0 ? 3 * options.positions : 5, classes, 1, options);
  CAPTURE(type, classes, options.metrics, options.probabilities, options.positions);
  const std::vector<double> logits = batch.dense_logits();
  launch_forward(batch);
  check(batch, logits);
  CHECK(batch.bad_target.is_set == 0);
  if (options.in_place) return;
  batch.grad.multiply(NAN);
  launch_backward(batch);
  check(batch, logits);
}

}  // namespace

TEST_CASE("losses and gradients are right for rows of every length") {
  for (const int classes : kLengths) {
    for (const Type type : {kHalf, kBFloat16, kFloat, kDouble}) {
      check_launches(type, classes, {});
      if (classes < 5000) check_launches(type, classes, with_features({}).back());
    }
    check_launches(kFloat, classes, {.grad_type = kBFloat16});
    check_launches(kFloat, classes, {.grad_type = kHalf});
    check_launches(kBFloat16, classes, {.in_place = true});
  }
}

TEST_CASE("losses and gradients are right for positions of images") {
  for (const Type type : {kHalf, kBFloat16, kFloat, kDouble}) {
    check_launches(type, 21, {.positions = 40});
    check_launches(type, 21, {.label_smoothing = 0.1, .positions = 40});
  }
}

TEST_CASE("a total weight is that of the targets, and a bad target is reported") {
  Batch batch(kFloat, 3000, 17, 0, {.weighted = true});
  double expected = 0;
  for (const int64_t target : batch.targets) {
    if (target != kIgnored) expected += batch.weight[target];
  }
  double total = NAN;
  FakeCaller caller;
  launch_cross_entropy_weigh(caller, rows_of(batch), &total);
  CHECK(std::fabs(total - expected) <= 1e-9 * expected);

  batch.targets[4] = 17;
  ampfuse::BadTarget* const report = allocate_bad_target(caller);
  LogitRows rows = rows_of(batch);
  rows.bad_target = report;
  launch_cross_entropy_weigh(caller, rows, &total);
  CHECK(report->is_set == 1);
  CHECK(report->row == 4);
  CHECK(report->target == 17);
  std::free(report);
}

TEST_CASE("a gradient is rescaled, as one array or as rows with gaps") {
  for (const Type type : {kHalf, kBFloat16, kFloat, kDouble}) {
    const Numbers grad(type, 9000);
    grad.fill(std::vector<double>(9000, 2));
    const Numbers upstream(arithmetic_of(type), 1);
    upstream.set(0, 3);
    const float baked = 6;
    FakeCaller caller;
    launch_cross_entropy_rescale(caller, {grad.data(), dtype_of(type), 4096, 9000, 4096}, &baked,
                                 upstream.data());
    CHECK(grad[0] == 1);
    CHECK(grad[8999] == 1);
    launch_cross_entropy_rescale(caller, {grad.data(), dtype_of(type), 100, 9000, 99}, &baked,
                                 upstream.data());
    CHECK(grad[98] == 0.5);
    CHECK(grad[99] == 1);
  }
}

TEST_CASE("shards of classes give the losses of all classes") {
  for (const Type type : {kFloat, kDouble}) {
    for (const int classes : {300, 20000}) {
      Batch batch(type, 5, classes, 0, {.metrics = true});
      launch_forward(batch);
      const int middle = classes / 3;
      const Shard shards[] = {{batch, 0, middle}, {batch, middle, classes}};
      std::vector<ampfuse::math::ShardPartial> partials(2 * batch.rows);
      FakeCaller caller;
      LogitRows rows = rows_of(batch);
      rows.is_shard = true;
      rows.ignore_index = -1;
      for (int i = 0; i < 2; ++i) {
        std::vector<int64_t> argmax(batch.rows);
        rows.logits = static_cast<char*>(batch.logits.data()) + shards[i].first * size_of(type);
        rows.classes = shards[i].classes;
        rows.target = shards[i].targets.data();
        auto* const mine = partials.data() + i * batch.rows;
        launch_cross_entropy_shards_reduce(caller, rows, mine, argmax.data());
        for (int64_t row = 0; row < batch.rows; ++row)
          mine[row].argmax = static_cast<double>(argmax[row] + shards[i].first);
      }
      std::vector<double> losses(batch.rows, NAN);
      std::vector<int64_t> argmax(batch.rows);
      const Numbers lse(arithmetic_of(type), batch.rows);
      const Numbers entropy(arithmetic_of(type), batch.rows);
      launch_cross_entropy_shards_join(caller, rows,
                                       {partials.data(), 2, classes, losses.data(), nullptr,
                                        lse.data(), entropy.data(), argmax.data()});
      CHECK(argmax == batch.argmax);
      for (int64_t row = 0; row < batch.rows; ++row) {
        CHECK(std::fabs(losses[row] - batch.losses[row]) <= 1e-5 * std::fabs(losses[row]));
        CHECK(std::fabs(lse[row] - batch.lse[row]) <= 1e-5 * std::fabs(lse[row]));
      }
    }
  }
}
