// Rows of 16-bit logits that the blocks of a cluster hold in registers.
#include "simt/simt.h"

#include "cross_entropy_exact.h"

#include <cmath>
#include <vector>

#include "catch.h"

using ampfuse::RowWork;

namespace {

using Team = ampfuse::ClusterTeam<64>;

template <typename scalar_t, typename Team>
void run_held(Batch<scalar_t>& batch) {
  constexpr int64_t kMost = ampfuse::HeldRow<scalar_t, Team>::kMostOfBlock;
  REQUIRE(batch.classes <= kMost * batch.options.cluster_blocks);
  forward_on_host<scalar_t, Team, RowWork::kHeld>(batch);
}

template <typename scalar_t, typename Team>
void check_cluster(int64_t rows, int classes, int64_t offset, const Options& options) {
  CAPTURE(rows, classes, offset, options.cluster_blocks, options.in_place);
  Batch<scalar_t> batch(rows, classes, offset, options);
  const std::vector<scalar_t> logits = batch.dense_logits();
  run_held<scalar_t, Team>(batch);
  check(batch, logits);
}

Options with_blocks(int cluster_blocks) {
  Options options;
  options.cluster_blocks = cluster_blocks;
  return options;
}

}  // namespace

TEMPLATE_TEST_CASE("rows of clusters have the exact loss and gradient, rounded, at every size",
                   "[asan]", c10::Half, c10::BFloat16) {
  for (const int blocks : {2, 4, 8}) {
    const int most = 2048 * blocks;
    // With few classes, the last blocks have no share of a row.
    for (const int classes : {1, 7, 8, 9, 8 * blocks - 1, 8 * blocks + 1, 777, most / 2 + 1,
                              most - 7 * blocks, most - 1, most}) {
      if (classes > most) continue;
      for (const bool in_place : {false, true}) {
        Options options = with_blocks(blocks);
        options.in_place = in_place;
        check_cluster<TestType, Team>(3, classes, 0, options);
        check_cluster<TestType, Team>(3, classes, classes % 8, options);
      }
    }
  }
}

TEMPLATE_TEST_CASE("rows of clusters are right in every schedule", "", c10::BFloat16) {
  simt::for_each_schedule([] {
    INFO(simt::schedule().name());
    for (const bool in_place : {false, true}) {
      // Nine rows take each of two clusters twice through both arrays of numbers.
      Options options = with_blocks(2);
      options.in_place = in_place;
      check_cluster<TestType, Team>(9, 2043, 3, options);
      check_cluster<TestType, Team>(9, 4096, 0, options);
      options.cluster_blocks = 4;
      check_cluster<TestType, Team>(9, 5001, 1, options);
    }
  });
}

TEMPLATE_TEST_CASE("logits and gradients of clusters may have any two alignments", "[asan]",
                   c10::BFloat16) {
  for (int offset = 0; offset < 8; ++offset) {
    for (int grad_offset = 0; grad_offset < 8; ++grad_offset) {
      Options options = with_blocks(2);
      options.grad_offset = grad_offset;
      options.padding = 5;
      check_cluster<TestType, Team>(3, 1003, offset, options);
    }
  }
}

TEST_CASE("a cluster of eight large blocks holds a row of 128,256 classes", "[asan]") {
  using Wide = ampfuse::ClusterTeam<512>;
  check_cluster<c10::BFloat16, Wide>(2, 128256, 0, with_blocks(8));
  check_cluster<c10::BFloat16, Wide>(2, 50257, 0, with_blocks(4));
}

TEMPLATE_TEST_CASE("logits of one block of a cluster may be far from those of others", "",
                   c10::Half, c10::BFloat16) {
  constexpr bool kIsHalf = std::is_same_v<TestType, c10::Half>;
  std::vector<double> sizes = {20, 100, 300, 30000};
  if (!kIsHalf) sizes.insert(sizes.end(), {0x1p16, 1e20, 3e38});
  for (const double size : sizes) {
    for (const double by : {size, -size}) {
      CAPTURE(by);
      // The second share of 400 classes, and one class of the last.
      for (const auto& [first, end] : {std::pair(400, 800), std::pair(1500, 1501)}) {
        Batch<TestType> batch(3, 1600, 1, with_blocks(4));
        batch.set_logits([&](int64_t row, int c, int64_t) {
          return c >= first && c < end ? by : 3 * std::sin(0.7 * row + 1.3 * c);
        });
        const std::vector<TestType> logits = batch.dense_logits();
        run_held<TestType, Team>(batch);
        check(batch, logits);
      }
    }
  }
}

TEMPLATE_TEST_CASE("a row of a cluster without a distribution is NaN and does not change others",
                   "", c10::Half, c10::BFloat16) {
  for (const double value : {double(NAN), HUGE_VAL, -HUGE_VAL}) {
    for (const int at : {0, 600, 1599}) {  // −∞ everywhere, NaN and ∞ at one class
      CAPTURE(value, at);
      Batch<TestType> batch(5, 1600, 1, with_blocks(4));
      for (int c = 0; c < batch.classes; ++c) {
        if (value < 0 || c == at) batch.logit(1, c) = as_element<TestType>(value);
      }
      run_held<TestType, Team>(batch);
      check_row_is_nan(batch, 1);
    }
  }
}

TEST_CASE("masked shares of a cluster have no part in the loss") {
  using scalar_t = c10::BFloat16;
  Batch<scalar_t> batch(2, 1600, 0, with_blocks(4));
  Batch<scalar_t> rest(2, 400, 0, {});
  for (int64_t row = 0; row < 2; ++row) {
    for (int c = 0; c < 1600; ++c) {
      batch.logit(row, c) = as_element<scalar_t>(c < 400 ? 0.5 * (c % 9) : -HUGE_VAL);
      if (c < 400) rest.logit(row, c) = batch.logit(row, c);
    }
    batch.targets[row] = rest.targets[row] = 7;
  }
  run_held<scalar_t, Team>(batch);
  run_held<scalar_t, SmallBlock>(rest);
  for (int64_t row = 0; row < 2; ++row) {
    CHECK(std::fabs(batch.losses[row] - rest.losses[row]) <= 1e-6 * rest.losses[row]);
    for (int c = 0; c < 1600; ++c) {
      const float expected = c < 400 ? static_cast<float>(rest.gradient_of(row, c)) : 0;
      CHECK(std::fabs(static_cast<float>(batch.gradient_of(row, c)) - expected) <=
            last_place<scalar_t>(expected));
    }
  }
}

TEST_CASE("equal rows of clusters give equal bits, whatever their alignment") {
  using scalar_t = c10::BFloat16;
  Batch<scalar_t> batch(9, 2003, 0, with_blocks(2));  // an odd stride: rows have all alignments
  batch.repeat_first_row();
  run_held<scalar_t, Team>(batch);
  for (int64_t row = 1; row < batch.rows; ++row) {
    CHECK(batch.losses[row] == batch.losses[0]);
    int misses = 0;
    for (int c = 0; c < batch.classes; ++c) {
      misses += batch.gradient_of(row, c).x != batch.gradient_of(0, c).x;
    }
    CHECK(misses == 0);
  }
}
