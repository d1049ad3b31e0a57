// Rows whose classes are divided into vocabulary shards: the kernels for one shard, and for joining
// the results of all shards.
#include "cross_entropy_exact.h"

#include "catch.h"

namespace {

// Replaces the results of forward with the joined results of two shards.
void by_shards(Batch& batch, Team team, int middle, int64_t all_classes) {
  const std::vector<Shard> shards = {{batch, 0, middle}, {batch, middle, batch.classes}};
  const bool with_metrics = batch.options.metrics;
  std::vector<ampfuse::math::ShardPartial> partials(2 * batch.rows);
  std::vector<int64_t> argmax(batch.rows);
  for (size_t i = 0; i < shards.size(); ++i) {
    auto* const mine = partials.data() + i * batch.rows;
    reduce_shard(batch, team, shards[i], mine, with_metrics ? argmax.data() : nullptr);
    for (int64_t row = 0; row < batch.rows && with_metrics; ++row) {
      mine[row].argmax = static_cast<double>(argmax[row] + shards[i].first);
    }
  }
  batch.grad.multiply(NAN);
  std::vector<double> losses(batch.rows, NAN);
  for (const Shard& shard : shards) {
    join_shards(batch, shard, partials.data(), 2, all_classes, losses.data());
    backward(batch, team, batch.grad, &shard);
  }
  double total = 0;
  for (int64_t row = 0; row < batch.rows; ++row) {
    batch.losses.set(row, losses[row]);
    total += losses[row];
  }
  batch.loss.set(0, total / batch.divisor);
}

void check_shards(Type type, Team team, int64_t rows, int classes, int middle,
                  const Options& options = {}) {
  CAPTURE(type, team, middle);
  Batch batch(type, rows, classes, 0, options);
  forward_alone(batch, team);
  by_shards(batch, team, middle, classes);
  check(batch, batch.dense_logits());
}

}  // namespace

TEST_CASE("shards are right in every schedule") {
  simt::for_each_schedule([&] {
    check_shards(kFloat, Team::kWarp, 9, 301, 128);
    check_shards(kFloat, Team::kBlock, 4, 2051, 1030);
    check_shards(kFloat, Team::kBlock, 4, 2051, 1030, with_features({}).back());
  });
}

TEST_CASE("two vocabulary shards give the results of the whole vocabulary", "[asan]") {
  for (const Type type : {kFloat, kDouble}) {
    check_shards(type, Team::kWarp, 9, 301, 128);
    check_shards(type, Team::kBlock, 4, 2051, 1030);
    for (const Options& options : with_features({})) {
      check_shards(type, Team::kWarp, 9, 301, 100, options);
      check_shards(type, Team::kBlock, 4, 2051, 1030, options);
    }
  }
  check_shards(kFloat, Team::kWarp, 9, 30, 1);  // a shard may have one class
  check_shards(kFloat, Team::kWarp, 9, 30, 29);
}

TEST_CASE("all logits of a shard may be far below those of the others, or -inf") {
  for (const bool metrics : {false, true}) {
    Batch batch(kFloat, 8, 64, 0, {.metrics = metrics});
    for (int64_t row = 0; row < 8; ++row) {
      for (int c = 0; c < 32; ++c) batch.set_logit(row, c, row < 4 ? -3e4 : -HUGE_VAL);
      if (batch.targets[row] != kIgnored) batch.targets[row] = 40 + row;
    }
    forward_alone(batch, Team::kWarp);
    by_shards(batch, Team::kWarp, 32, 64);
    check(batch, batch.dense_logits());
  }
}

TEST_CASE("a target that no shard holds makes its row NaN") {
  Batch batch(kFloat, 2, 40);
  batch.targets = {5, 30};
  forward_alone(batch, Team::kWarp);
  batch.targets = {5, 40};
  by_shards(batch, Team::kWarp, 20, 40);
  CHECK(std::isfinite(batch.losses[0]));
  CHECK(std::isnan(batch.losses[1]));
}

TEST_CASE("rows are NaN if the shards do not cover all classes") {
  Batch batch(kFloat, 8, 40);
  forward_alone(batch, Team::kWarp);
  by_shards(batch, Team::kWarp, 20, 41);
  for (int64_t row = 0; row < 8; ++row) {
    CHECK(std::isnan(batch.losses[row]) == (batch.targets[row] != kIgnored));
  }
}
