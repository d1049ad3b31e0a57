// Rows of 16-bit logits that a team holds in registers.
#include "simt/simt.h"

#include "cross_entropy_exact.h"

#include <cmath>
#include <limits>
#include <vector>

#include "catch.h"

using ampfuse::RowWork;

namespace {

template <typename scalar_t, typename Team>
constexpr int kMostClasses = static_cast<int>(ampfuse::HeldRow<scalar_t, Team>::kMostClasses);

template <typename scalar_t, typename Team>
void check_held(int64_t rows, int classes, int64_t offset, const Options& options) {
  REQUIRE(classes <= kMostClasses<scalar_t, Team>);
  run_and_check<scalar_t, Team>(rows, classes, offset, options);
}

// The numbers of classes around which a thread gets another pack, and around which teams are full.
template <typename scalar_t, typename Team>
std::vector<int> sizes() {
  const int most = kMostClasses<scalar_t, Team>;
  return {1,        7,   8, 9, 15, 17, 24, 25, most / 4 - 1, most / 4, most / 4 + 9, most / 2 + 1,
          most - 7, most};
}

template <typename scalar_t, typename Team>
void check_sizes(int64_t rows) {
  for (const int classes : sizes<scalar_t, Team>()) {
    for (const bool in_place : {false, true}) {
      CAPTURE(in_place);
      Options options;
      options.in_place = in_place;
      check_held<scalar_t, Team>(rows, classes, classes % 8, options);
      check_held<scalar_t, Team>(rows, classes, 0, options);
    }
  }
}

}  // namespace

TEMPLATE_TEST_CASE("held rows of every size have the exact loss and gradient, rounded", "[asan]",
                   c10::Half, c10::BFloat16) {
  check_sizes<TestType, FewLanes>(9);
  check_sizes<TestType, WarpTeam>(5);
  check_sizes<TestType, SmallBlock>(3);
  check_sizes<TestType, BlockTeam>(3);
}

TEMPLATE_TEST_CASE("held rows are right in every schedule", "", c10::BFloat16) {
  simt::for_each_schedule([] {
    INFO(simt::schedule().name());
    for (const bool in_place : {false, true}) {
      Options options;
      options.in_place = in_place;
      check_held<TestType, FewLanes>(70, 251, 1, options);
      check_held<TestType, WarpTeam>(35, 1000, 0, options);
      check_held<TestType, SmallBlock>(5, 2043, 3, options);
      check_held<TestType, ampfuse::BlockTeam<128>>(5, 2501, 3, options);
      check_held<TestType, WideTeam>(5, 9001, 3, options);
    }
  });
}

TEMPLATE_TEST_CASE("held logits and their gradients may have any two alignments", "[asan]",
                   c10::BFloat16) {
  for (int offset = 0; offset < 8; ++offset) {
    for (int grad_offset = 0; grad_offset < 8; ++grad_offset) {
      CAPTURE(offset, grad_offset);
      Options options;
      options.grad_offset = grad_offset;
      for (const int classes : {1, 16, 23, 250}) {
        check_held<TestType, FewLanes>(5, classes, offset, options);
      }
      options.padding = 5;
      check_held<TestType, WarpTeam>(3, 1000, offset, options);
    }
  }
}

TEMPLATE_TEST_CASE("a thread's logits may be far from those of others, and from each other", "",
                   c10::Half, c10::BFloat16) {
  constexpr bool kIsHalf = std::is_same_v<TestType, c10::Half>;
  std::vector<double> sizes = {20, 60, 100, 300, 30000};
  if (!kIsHalf) sizes.insert(sizes.end(), {0x1p16, 1e20, 3e38});
  const auto moderate = [](int64_t row, int c) { return 3 * std::sin(0.7 * row + 1.3 * c); };
  for (const double size : sizes) {
    for (const double by : {size, -size}) {
      CAPTURE(by);
      // One pack, one class, every second class, the target.
      check_logits<TestType, WarpTeam, RowWork::kHeld>(
          5, 531, [&](int64_t row, int c, int64_t) { return c / 8 == 5 ? by : moderate(row, c); },
          {});
      check_logits<TestType, SmallBlock, RowWork::kHeld>(
          3, 1800, [&](int64_t row, int c, int64_t) { return c == 77 ? by : moderate(row, c); },
          {});
      check_logits<TestType, FewLanes, RowWork::kHeld>(
          9, 77, [&](int64_t row, int c, int64_t) { return c % 2 == 0 ? by : moderate(row, c); },
          {});
      check_logits<TestType, BlockTeam, RowWork::kHeld>(
          3, 4101,
          [&](int64_t row, int c, int64_t target) { return c == target ? by : moderate(row, c); },
          {});
    }
  }
}

TEMPLATE_TEST_CASE("masked classes of held rows have no part in losses and gradients", "",
                   c10::Half, c10::BFloat16) {
  for (const double mask : {-HUGE_VAL, double(std::numeric_limits<TestType>::lowest()), -1e4}) {
    CAPTURE(mask);
    // With −93, the references of masked threads and of the row are 2¹²⁸ apart.
    for (const double around : {0.0, -93.0, -1000.0, 1000.0}) {
      CAPTURE(around);
      // All logits of some threads are masked, and all but one of others.
      Batch<TestType> batch(3, 777, 1, {});
      Batch<TestType> rest(3, 15, 1, {});
      const auto logit = [&](int64_t row, int k) { return around + 0.5 * double((row + k) % 9); };
      batch.set_logits(
          [&](int64_t row, int c, int64_t) { return c % 52 == 0 ? logit(row, c / 52) : mask; });
      rest.set_logits([&](int64_t row, int c, int64_t) { return logit(row, c); });
      for (int64_t row = 0; row < 3; ++row) {
        rest.targets[row] = 3 * row;
        batch.targets[row] = 52 * 3 * row;
      }
      forward_on_host<TestType, WarpTeam, RowWork::kHeld>(batch);
      forward_on_host<TestType, WarpTeam, RowWork::kHeld>(rest);
      int misses = 0;
      for (int64_t row = 0; row < 3; ++row) {
        misses += !(std::fabs(batch.losses[row] - rest.losses[row]) <= 1e-6 * rest.losses[row]);
        for (int c = 0; c < batch.classes; ++c) {
          const auto got = static_cast<float>(batch.gradient_of(row, c));
          if (c % 52 != 0) {
            misses += got != 0;
          } else {
            const auto exact = static_cast<float>(rest.gradient_of(row, c / 52));
            misses += !(std::fabs(got - exact) <= last_place<TestType>(exact));
          }
        }
      }
      CHECK(misses == 0);
    }
  }
}

TEMPLATE_TEST_CASE("a held row without a distribution is NaN and does not change others", "",
                   c10::Half, c10::BFloat16) {
  for (const double value : {double(NAN), HUGE_VAL, -HUGE_VAL}) {
    for (const int at : {0, 300, 776}) {  // −∞ everywhere, NaN and ∞ at one class
      CAPTURE(value, at);
      Batch<TestType> batch(3, 777, 1, {});
      for (int c = 0; c < batch.classes; ++c) {
        if (value < 0 || c == at) batch.logit(1, c) = as_element<TestType>(value);
      }
      batch.logit(1, 5) = as_element<TestType>(value < 0 ? value : 40000.0);
      forward_on_host<TestType, WarpTeam, RowWork::kHeld>(batch);
      check_row_is_nan(batch, 1);
    }
  }
}

TEST_CASE("held rows whose gradient is aligned need no shared memory") {
  using scalar_t = c10::BFloat16;
  Batch<scalar_t> batch(5, 1000, 0, {});
  const std::vector<scalar_t> logits = batch.dense_logits();
  simt::launch(ampfuse::cross_entropy_weigh_kernel<scalar_t>, batch.weights.size(),
               ampfuse::kThreads, 0, batch.table(), batch.weights.data(), &batch.finished);
  simt::launch(ampfuse::cross_entropy_forward_kernel<scalar_t, WarpTeam, RowWork::kHeld, scalar_t>,
               kGrid, WarpTeam::kBlock, 0, batch.table(), batch.reduction(), batch.results(), 0);
  check(batch, logits);
}

TEST_CASE("a held row whose target is out of range is NaN, and other rows are finite") {
  using scalar_t = c10::BFloat16;
  Batch<scalar_t> batch(3, 777, 1, {});
  batch.targets[1] = 777;
  forward_on_host<scalar_t, WarpTeam, RowWork::kHeld>(batch);
  CHECK(batch.bad_target.is_set == 1);
  CHECK(batch.bad_target.row == 1);
  CHECK(batch.bad_target.target == 777);
  check_row_is_nan(batch, 1);
}

TEST_CASE("small blocks sum the target weights of more blocks than they have threads") {
  using scalar_t = c10::BFloat16;
  Batch<scalar_t> batch(1, 9, 0, {});
  batch.weights.assign(200, {0.5, batch.rows});
  batch.weights[3].bad_row = 0;  // the thread that reads it also reads 67, 131 and 195
  simt::launch(
      ampfuse::cross_entropy_forward_kernel<scalar_t, SmallBlock, RowWork::kHeld, scalar_t>, kGrid,
      SmallBlock::kBlock, 4096, batch.table(), batch.reduction(), batch.results(), 256);
  CHECK(batch.divisor == 100);
  CHECK(batch.bad_target.is_set == 1);
  CHECK(batch.bad_target.row == 0);
}

TEST_CASE("a held row gives the same loss with and without a gradient") {
  using scalar_t = c10::BFloat16;
  Batch<scalar_t> whole(9, 701, 1, {});
  forward_on_host<scalar_t, WarpTeam, RowWork::kHeld>(whole);
  Batch<scalar_t> without(9, 701, 1, {});
  auto results = without.results();
  results.grad = nullptr;
  forward_on_host<scalar_t, WarpTeam, RowWork::kHeld>(without, results);
  CHECK(whole.losses == without.losses);
  CHECK(whole.loss == without.loss);
}
