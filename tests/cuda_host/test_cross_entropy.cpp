// The kernels of cross_entropy: values compared with long double, memory and races under
// sanitizers.
#include "simt/simt.h"

#include "cross_entropy_exact.h"

#include <cmath>
#include <vector>

#include "catch.h"

using ampfuse::RowWork;

namespace {

template <typename scalar_t, typename Team, size_t kSizes>
void check_team(int64_t rows, const int (&sizes)[kSizes]) {
  simt::for_each_schedule([&] {
    INFO(simt::schedule().name());
    for (const int classes : sizes) {
      run_and_check<scalar_t, Team>(rows, classes, classes % 4, {});
    }
  });
}

// Class counts on both sides of each unit of a team: single classes, a pack per lane, four packs
// per lane, the part of a row that is kept.
const int kFewClasses[] = {1, 2, 7, 10, 65, 128};
const int kWarpClasses[] = {1, 2, 7, 31, 257, 520, 1027};
const int kBlockClasses[] = {5, 2049, 8200, 9001};
const int kWideClasses[] = {4095, 9001};

}  // namespace

TEMPLATE_TEST_CASE("rows of a few lanes have the exact loss and gradient, rounded", "", c10::Half,
                   c10::BFloat16, float) {
  check_team<TestType, FewLanes>(70, kFewClasses);
}

TEMPLATE_TEST_CASE("rows of a warp have the exact loss and gradient, rounded", "", c10::Half,
                   c10::BFloat16, float, double) {
  check_team<TestType, WarpTeam>(9, kWarpClasses);
}

TEMPLATE_TEST_CASE("rows of a block have the exact loss and gradient, rounded", "", c10::Half,
                   c10::BFloat16, float, double) {
  check_team<TestType, BlockTeam>(3, kBlockClasses);
}

TEMPLATE_TEST_CASE("rows of a wide block have the exact loss and gradient, rounded", "", c10::Half,
                   c10::BFloat16, float) {
  check_team<TestType, WideTeam>(3, kWideClasses);
}

TEMPLATE_TEST_CASE("rows of the widest block have the exact loss and gradient, rounded", "",
                   c10::Half, c10::BFloat16, float) {
  run_and_check<TestType, WidestTeam>(3, 8191, 3, {});
}

TEMPLATE_TEST_CASE("loss and gradient are right however many packs of a row are kept", "",
                   c10::BFloat16, float) {
  for (const int pieces : {0, 1, 2, 9}) {
    CAPTURE(pieces);
    Options options;
    options.kept_pieces = pieces;
    for (const bool in_place : {false, true}) {
      options.in_place = in_place;
      run_and_check<TestType, FewLanes>(40, 127, 1, options);
      run_and_check<TestType, WarpTeam>(9, 1027, 2, options);
      run_and_check<TestType, BlockTeam>(3, 9001, 3, options);
      run_and_check<TestType, WideTeam>(3, 9001, 3, options);
    }
    run_and_check<TestType, WidestTeam>(2, 17001, 3, options);
  }
}

TEMPLATE_TEST_CASE("losses near 0 of confident rows have a relative error below 1e-6", "",
                   c10::Half, c10::BFloat16, float) {
  // All other logits are equal, so that the errors of their exponentials do not average out.
  const auto lead = [](int64_t row) { return 0.375 * static_cast<double>(16 + row); };
  const auto check_losses = [&]<RowWork kWork>() {
    Batch<TestType> batch(64, 41, 1, {});
    for (int64_t row = 0; row < batch.rows; ++row) batch.targets[row] = row % batch.classes;
    batch.set_logits(
        [&](int64_t row, int c, int64_t target) { return c == target ? 0.5 + lead(row) : 0.5; });
    forward_on_host<TestType, WarpTeam, kWork>(batch);
    for (int64_t row = 0; row < batch.rows; ++row) {
      CAPTURE(row, static_cast<int>(kWork));
      const double exact = std::log1p(40 * std::exp(-lead(row)));
      CHECK(std::fabs(batch.losses[row] - exact) <= 1e-6 * exact);
    }
  };
  check_losses.template operator()<RowWork::kPlain>();
  if constexpr (sizeof(TestType) == 2) check_losses.template operator()<RowWork::kHeld>();
}

TEMPLATE_TEST_CASE("tiny gradients keep digits that only a large scale makes visible", "",
                   c10::Half, c10::BFloat16, float) {
  const auto logit = [](int64_t, int c, int64_t target) {
    return c == target ? 50 : -38 - 0.25 * c;
  };
  Options options;
  options.scale = 0x1p127f;
  for (int kept = 0; kept < 2; ++kept) {
    options.kept_pieces = kept;
    check_logits<TestType, WarpTeam, RowWork::kPlain>(1, 97, logit, options);
  }
  if constexpr (sizeof(TestType) == 2) {
    check_logits<TestType, FewLanes, RowWork::kHeld>(1, 97, logit, options);
  }
}

TEMPLATE_TEST_CASE("argmax is the first of equal largest logits", "", c10::BFloat16, float) {
  const auto argmax = [](int first, int second, double value) {
    Options options;
    options.metrics = true;
    Batch<TestType> batch(1, 301, 0, options);
    std::fill_n(batch.logits.data(), batch.classes, as_element<TestType>(0.0));
    batch.logits.data()[first] = as_element<TestType>(value);
    batch.logits.data()[second] = as_element<TestType>(value);
    forward_on_host<TestType, WarpTeam, RowWork::kGeneral>(batch);
    return batch.argmax[0];
  };
  // Threads read packs in turn, and single classes after the last pack.
  for (const double value : {0.0, 7.0, double(NAN)}) {
    CAPTURE(value);
    CHECK(argmax(0, 300, value) == 0);
    CHECK(argmax(5, 296, value) == (value == 0 ? 0 : 5));
    CHECK(argmax(299, 300, value) == (value == 0 ? 0 : 299));
  }
}

TEST_CASE("the divisor is the total weight of all targets") {
  Options options;
  options.weighted = true;
  Batch<float> batch(1500, 3, 0, options);
  forward_on_host<float, FewLanes, RowWork::kPlain>(batch);
  double weight = 0;
  for (const int64_t target : batch.targets) {
    if (target != kIgnored) weight += batch.weight[target];
  }
  CHECK(std::fabs(batch.divisor - weight) <= 1e-12 * weight);
}

TEMPLATE_TEST_CASE("logits may be overwritten with their gradient in every schedule", "",
                   c10::BFloat16, float) {
  simt::for_each_schedule([] {
    INFO(simt::schedule().name());
    Options options;
    options.in_place = true;
    run_and_check<TestType, WarpTeam>(17, 530, 1, options);
    run_and_check<TestType, BlockTeam>(3, 2500, 3, options);
  });
}

TEMPLATE_TEST_CASE("losses with every option match the reference", "", c10::BFloat16, float,
                   double) {
  std::vector<Options> all = each_by_itself({});
  all.push_back({0.2, 1e-2, 10, true, true, true, true, 3});
  for (const Options& options : all) {
    run_and_check<TestType, WarpTeam>(6, 301, 1, options);
    run_and_check<TestType, BlockTeam>(3, 2303, 2, options);
  }
}
