// Inputs and outputs of the cross_entropy kernels: index types, optional results, bad targets,
// scales, and backward from the statistics of forward.
#include "simt/simt.h"

#include "cross_entropy_exact.h"

#include <cmath>
#include <cstring>
#include <vector>

#include "catch.h"

using ampfuse::IndexType;
using ampfuse::RowWork;

namespace {

template <typename T>
bool same_bits(const std::vector<T>& a, const std::vector<T>& b) {
  return a.size() == b.size() && std::memcmp(a.data(), b.data(), a.size() * sizeof(T)) == 0;
}

template <typename T>
bool same_bits(const FakeTensor<T>& a, const FakeTensor<T>& b) {
  return a.size == b.size && std::memcmp(a.data(), b.data(), a.size * sizeof(T)) == 0;
}

// Checks that backward gives the gradient of forward; logits and gradients differ in row stride.
template <typename scalar_t, typename Team, RowWork kWork>
void check_backward(int64_t rows, int classes, Options options) {
  CAPTURE(rows, classes, sizeof(scalar_t));
  options.padding = 3;
  Batch<scalar_t> batch(rows, classes, 1, options);
  forward_on_host<scalar_t, Team, kWork>(batch);
  FakeTensor<scalar_t> grad(batch.grad.size, batch.grad.offset);
  const double upstream = batch.baked;
  simt::launch(ampfuse::cross_entropy_backward_kernel<scalar_t, Team, kWork, scalar_t>, kGrid,
               Team::kBlock, 0, batch.table(), batch.statistics.data(), &batch.divisor, &upstream,
               false, grad.data(), batch.rows_at(classes));
  CHECK(same_bits(grad, batch.grad));
}

}  // namespace

TEMPLATE_TEST_CASE("backward from the statistics of forward gives its gradient", "", c10::BFloat16,
                   float) {
  Options smoothed;
  smoothed.label_smoothing = 0.1;
  Options by_position;
  by_position.positions = 40;
  simt::for_each_schedule([&] {
    INFO(simt::schedule().name());
    check_backward<TestType, WarpTeam, RowWork::kPlain>(9, 701, {});
    check_backward<TestType, BlockTeam, RowWork::kPlain>(9, 2500, {});
    check_backward<TestType, BlockTeam, RowWork::kGeneral>(5, 2049, smoothed);
    check_backward<TestType, ampfuse::PositionTeam, RowWork::kPlain>(120, 21, by_position);
  });
}

TEMPLATE_TEST_CASE("targets may have every index type", "", c10::BFloat16, float) {
  for (const IndexType index_type : {IndexType::kLong, IndexType::kInt, IndexType::kByte}) {
    CAPTURE(static_cast<int>(index_type));
    Options options;
    options.weighted = true;
    options.index_type = index_type;
    run_and_check<TestType, WarpTeam>(33, 201, 1, options);
  }
}

TEST_CASE("omitting a result does not change the other results") {
  using scalar_t = c10::BFloat16;
  using Results = ampfuse::CrossEntropyResults<scalar_t, scalar_t>;
  const auto run = [](auto without) {
    Batch<scalar_t> batch(9, 701, 1, {});
    Results results = batch.results();
    without(results);
    forward_on_host<scalar_t, WarpTeam, RowWork::kPlain>(batch, results);
    return batch;
  };
  const Batch<scalar_t> whole = run([](Results&) {});

  SECTION("no gradient") {
    const auto batch = run([](Results& results) { results.grad = nullptr; });
    CHECK(same_bits(batch.losses, whole.losses));
    CHECK(same_bits(batch.statistics, whole.statistics));
    CHECK(batch.loss == whole.loss);
  }
  SECTION("no statistics") {
    const auto batch = run([](Results& results) { results.statistics = nullptr; });
    CHECK(same_bits(batch.losses, whole.losses));
    CHECK(same_bits(batch.grad, whole.grad));
    CHECK(batch.loss == whole.loss);
  }
  SECTION("no losses of rows") {
    const auto batch = run([](Results& results) { results.row_losses = nullptr; });
    CHECK(same_bits(batch.grad, whole.grad));
    CHECK(batch.loss == whole.loss);
    CHECK(std::isnan(batch.losses[0]));
  }
  SECTION("no sum of losses") {
    const auto batch = run([](Results& results) { results.reduced.loss = nullptr; });
    CHECK(same_bits(batch.losses, whole.losses));
    CHECK(same_bits(batch.grad, whole.grad));
    CHECK(std::isnan(batch.loss));
  }
}

TEST_CASE("a target out of range makes its row NaN and is reported") {
  Batch<float> batch(5, 40, 0, {});
  batch.targets = {3, 40, kIgnored, -1, 7};
  forward_on_host<float, WarpTeam, RowWork::kPlain>(batch);
  CHECK(batch.bad_target.is_set == 1);
  CHECK(batch.bad_target.row == 1);
  CHECK(batch.bad_target.target == 40);
  CHECK(std::isfinite(batch.losses[0]));
  CHECK(std::isnan(batch.losses[1]));
  CHECK(batch.losses[2] == 0);
  CHECK(std::isnan(batch.losses[3]));
  CHECK(std::isnan(batch.loss));
}

TEST_CASE("a gradient is rescaled only if the upstream gradient is not baked_scale") {
  // Parts of 261 elements divide the gradient equally; of parts of 100, the last one is shorter.
  for (const int count : {261, 100}) {
    simt::for_each_schedule([&] {
      auto grad = random_tensor<c10::BFloat16>(7 * 261, 3, 5);
      const std::vector<c10::BFloat16> before(grad.data(), grad.data() + grad.size);
      const float baked = 8;
      for (const float upstream : {8.0f, 3.0f}) {
        simt::launch(ampfuse::cross_entropy_rescale_kernel<c10::BFloat16>, 2, ampfuse::kThreads, 0,
                     grad.data(), int64_t(count), grad.size, count, &baked, &upstream);
        for (int64_t i = 0; i < grad.size; ++i) {
          const auto expected =
              static_cast<c10::BFloat16>(static_cast<float>(before[i]) * (upstream / baked));
          REQUIRE(static_cast<float>(grad.data()[i]) == static_cast<float>(expected));
        }
      }
    });
  }
}

TEST_CASE("a scale that is 0, infinite or NaN is replaced by 1") {
  for (const float scale : {0.0f, INFINITY, NAN}) {
    Options options;
    options.scale = scale;
    Batch<float> batch(4, 30, 0, options);
    forward_on_host<float, WarpTeam, RowWork::kPlain>(batch);
    CHECK(batch.baked == 1);
  }
}

TEST_CASE("a scale is lowered by powers of two if gradients would overflow") {
  Options options;
  options.limit = 65504;
  for (const auto& [scale, baked] : {std::pair{65504.0f * 4, 65504.0f * 4},
                                     {65536.0f * 4, 65536.0f * 2},
                                     {-65536.0f * 3 * 4, -65536.0f * 3},
                                     {1e38f, std::ldexp(1e38f, -109)}}) {
    options.scale = scale;
    Batch<float> batch(5, 30, 0, options);
    forward_on_host<float, WarpTeam, RowWork::kPlain>(batch);
    CHECK(batch.divisor == 4);
    CHECK(batch.baked == baked);
  }
}
