// Inputs and outputs of the cross_entropy kernels: index types, optional results, bad targets,
// scales, and backward from the statistics of forward.
#include "cross_entropy_exact.h"

#include "catch.h"

using ampfuse::IndexType;
using ampfuse::RowWork;

namespace {

// Checks that backward gives the gradient of forward; logits and gradients differ in row stride.
void check_backward(Type type, Team team, int64_t rows, int classes, Options options = {}) {
  CAPTURE(type, team, rows, classes);
  options.padding = 3;
  Batch batch(type, rows, classes, 1, options);
  weigh(batch);
  forward(batch, team);
  const Numbers grad(batch.grad.type, batch.grad.size, batch.grad.offset);
  backward(batch, team, grad);
  CHECK(grad.bits() == batch.grad.bits());
}

}  // namespace

TEST_CASE("backward from the statistics of forward gives its gradient") {
  simt::for_each_schedule([] {
    for (const Type type : {kBFloat16, kFloat}) {
      check_backward(type, Team::kWarp, 9, 701);
      check_backward(type, Team::kBlock, 9, 2500);
      check_backward(type, Team::kBlock, 5, 2049, {.label_smoothing = 0.1});
      check_backward(type, Team::kPosition, 120, 21, {.positions = 40});
    }
    check_backward(kFloat, Team::kWarp, 9, 1027, {.grad_type = kBFloat16});
  });
}

TEST_CASE("targets may have every index type") {
  for (const IndexType index_type : {IndexType::kLong, IndexType::kInt, IndexType::kByte}) {
    for (const Type type : {kBFloat16, kFloat}) {
      CAPTURE(index_type);
      Batch batch(type, 33, 201, 1, {.weighted = true, .index_type = index_type});
      weigh(batch);
      const double weight = batch.weights[0].weight + batch.weights[1].weight;
      run_and_check(batch, Team::kWarp);
      CHECK(std::fabs(batch.divisor - weight) <= 1e-12 * weight);
    }
  }
}

TEST_CASE("omitting a result does not change the other results") {
  const auto run = [](Type type, std::optional<Result> without) {
    Batch batch(type, 9, 701, 1, {.without = without});
    forward_alone(batch, Team::kWarp);
    return batch;
  };
  for (const Type type : {kBFloat16, kFloat}) {  // a held row, and a kept one
    const Batch whole = run(type, {});
    for (const Result result :
         {Result::kGrad, Result::kStatistics, Result::kRowLosses, Result::kLoss}) {
      CAPTURE(type, result);
      const Batch batch = run(type, result);
      const Numbers nothing(type, batch.grad.size);
      CHECK(batch.grad.bits() == (result == Result::kGrad ? nothing : whole.grad).bits());
      if (result != Result::kStatistics) {
        CHECK(std::memcmp(batch.statistics.data(), whole.statistics.data(),
                          9 * sizeof whole.statistics[0]) == 0);
      }
      if (result == Result::kRowLosses) {
        CHECK(std::isnan(batch.losses[0]));
      } else {
        CHECK(batch.losses.bits() == whole.losses.bits());
      }
      CHECK(std::isnan(batch.loss[0]) == (result == Result::kLoss));
      if (result != Result::kLoss) CHECK(batch.loss[0] == whole.loss[0]);
    }
  }
}

TEST_CASE("the divisor is the total weight of all valid targets") {
  const auto check_divisor = [](bool of_total) {
    Batch batch(kFloat, 1500, 3, 0, {.weighted = true});
    double weight = 0;
    for (int64_t row = 0; row < batch.rows; ++row) {
      const int64_t target = batch.targets[row];
      if (target != kIgnored && row != 8 && row != 1032) weight += batch.weight[target];
    }
    batch.targets[8] = batch.targets[1032] = 3;  // out of range; one thread reads both
    weigh(batch);
    of_total ? total(batch) : forward(batch, Team::kFewLanes);
    CHECK(std::fabs(batch.divisor - weight) <= 1e-12 * weight);
    CHECK(batch.bad_target.is_set == 1);
    CHECK(batch.bad_target.row == 8);
    CHECK(batch.bad_target.target == 3);
  };
  check_divisor(/*of_total=*/false);
  check_divisor(/*of_total=*/true);
}

TEST_CASE("a target out of range makes its row NaN and is reported") {
  for (const Type type : {kBFloat16, kFloat}) {
    Batch batch(type, 5, 40);
    batch.targets = {3, 40, kIgnored, -1, 7};
    weigh(batch);
    forward(batch, Team::kWarp);
    CHECK(batch.bad_target.is_set == 1);
    CHECK(batch.bad_target.row == 1);
    CHECK(batch.bad_target.target == 40);
    CHECK(std::isfinite(batch.losses[0]));
    CHECK(std::isnan(batch.losses[1]));
    CHECK(batch.losses[2] == 0);
    CHECK(std::isnan(batch.losses[3]));
    CHECK(std::isnan(batch.loss[0]));
    batch.targets[3] = 7;
    weigh(batch);
    forward(batch, Team::kWarp);
    check_row_is_nan(batch, 1);
  }
}

TEST_CASE("small blocks sum the target weights of more blocks than they have threads") {
  Batch batch(kBFloat16, 1, 9);
  batch.weights.assign(200, {0.5, batch.rows});
  batch.weights[3].bad_row = 0;  // the thread that reads it also reads 67, 131 and 195
  forward(batch, Team::kBlock64);
  CHECK(batch.divisor == 100);
  CHECK(batch.bad_target.is_set == 1);
  CHECK(batch.bad_target.row == 0);
}

TEST_CASE("a gradient is rescaled only if the upstream gradient is not baked_scale") {
  // Parts of 261 elements divide the gradient equally; of parts of 100, the last one is shorter.
  for (const int count : {261, 100}) {
    simt::for_each_schedule([&] {
      const Numbers grad(kBFloat16, 7 * 261, 3);
      const Numbers expected(kBFloat16, grad.size);
      for (const float upstream : {8.0f, 3.0f}) {
        grad.fill(random_values(grad.size, 5));
        expected.fill(random_values(grad.size, 5));
        rescale(grad, count, /*baked=*/8, upstream);
        expected.multiply(upstream / 8);
        CHECK(grad.bits() == expected.bits());
      }
    });
  }
}

TEST_CASE("a scale that is 0, infinite or NaN is replaced by 1") {
  for (const float scale : {0.0f, INFINITY, NAN}) {
    Batch batch(kFloat, 4, 30, 0, {.scale = scale});
    forward_alone(batch, Team::kWarp);
    CHECK(batch.baked == 1);
  }
}

TEST_CASE("a scale is lowered by powers of two if gradients would overflow") {
  for (const auto& [scale, baked] : {std::pair{65504.0f * 4, 65504.0f * 4},
                                     {65536.0f * 4, 65536.0f * 2},
                                     {-65536.0f * 3 * 4, -65536.0f * 3},
                                     {1e38f, std::ldexp(1e38f, -109)}}) {
    Batch batch(kFloat, 5, 30, 0, {.scale = scale, .limit = 65504});
    forward_alone(batch, Team::kWarp);
    CHECK(batch.divisor == 4);
    CHECK(batch.baked == baked);
  }
}
