// Rows of logits at every distance from a 16-byte boundary, which may differ from that of other
// rows and of their gradients.
#include "simt/simt.h"

#include "cross_entropy_exact.h"

#include <cstring>

#include "catch.h"

using ampfuse::RowWork;

namespace {

// Checks that equal rows give equal bits, each at its own distance from a boundary.
template <typename scalar_t, typename Team, RowWork kWork>
void check_rows_alike(int64_t rows, int classes, const Options& options) {
  CAPTURE(rows, classes, sizeof(scalar_t), Team::kSize, options.kept_pieces, options.in_place);
  Batch<scalar_t> batch(rows, classes, 0, options);
  batch.repeat_first_row();
  forward_on_host<scalar_t, Team, kWork>(batch);
  int misses = 0;
  for (int64_t row = 1; row < rows; ++row) {
    const auto is_like_first = [&](const auto* results, int64_t count) {
      return std::memcmp(results, results + row * count, count * sizeof *results) == 0;
    };
    misses += !is_like_first(batch.losses.data(), 1);
    misses += !is_like_first(batch.statistics.data(), 1);
    misses += !is_like_first(batch.gradient(), classes);
    if (!options.metrics) continue;
    misses += !is_like_first(batch.lse.data(), 1);
    misses += !is_like_first(batch.entropy.data(), 1);
    misses += !is_like_first(batch.argmax.data(), 1);
  }
  CHECK(misses == 0);
}

// Checks rows that are kept not at all, partly and completely, the last also in place.
template <typename scalar_t, typename Team, RowWork kWork>
void check_all_kept(int64_t rows, int classes, Options options) {
  for (const int kept_pieces : {0, 1, 9}) {
    options.kept_pieces = kept_pieces;
    check_rows_alike<scalar_t, Team, kWork>(rows, classes, options);
  }
  options.in_place = true;
  check_rows_alike<scalar_t, Team, kWork>(rows, classes, options);
}

// All classes that a team has in flight at once, some more, and single ones.
template <typename scalar_t, typename Team>
constexpr int kManyClasses = 4 * Team::kSize * 16 / sizeof(scalar_t) + 307;

}  // namespace

TEMPLATE_TEST_CASE("equal rows give equal bits at every alignment", "", c10::BFloat16, float) {
  constexpr RowWork kPlain = RowWork::kPlain;
  check_all_kept<TestType, FewLanes, kPlain>(70, 127, {});
  check_all_kept<TestType, WarpTeam, kPlain>(19, kManyClasses<TestType, WarpTeam>, {});
  check_all_kept<TestType, BlockTeam, kPlain>(5, kManyClasses<TestType, BlockTeam>, {});
  check_rows_alike<TestType, WideTeam, kPlain>(4, kManyClasses<TestType, WideTeam>, {});
  check_rows_alike<TestType, WidestTeam, kPlain>(3, kManyClasses<TestType, WidestTeam>, {});
}

TEMPLATE_TEST_CASE("equal held rows give equal bits at every alignment", "", c10::Half,
                   c10::BFloat16) {
  for (const bool in_place : {false, true}) {
    Options options;
    options.in_place = in_place;
    check_rows_alike<TestType, FewLanes, RowWork::kHeld>(70, 253, options);
    check_rows_alike<TestType, WarpTeam, RowWork::kHeld>(19, 1021, options);
    check_rows_alike<TestType, SmallBlock, RowWork::kHeld>(9, 2045, options);
    check_rows_alike<TestType, ampfuse::BlockTeam<128>, RowWork::kHeld>(9, 2051, options);
    check_rows_alike<TestType, BlockTeam, RowWork::kHeld>(9, 5001, options);
    check_rows_alike<TestType, WideTeam, RowWork::kHeld>(9, 9001, options);
  }
}

TEMPLATE_TEST_CASE("equal rows give equal bits at every alignment with all options", "",
                   c10::BFloat16, float) {
  constexpr RowWork kGeneral = RowWork::kGeneral;
  Options options;
  options.weighted = true;
  options.softcap = 30;
  options.z_loss = 1e-3;
  options.label_smoothing = 0.1;
  options.metrics = true;
  check_all_kept<TestType, WarpTeam, kGeneral>(9, kManyClasses<TestType, WarpTeam>, options);
  check_rows_alike<TestType, BlockTeam, kGeneral>(5, kManyClasses<TestType, BlockTeam>, options);
  options.probabilities = true;
  check_rows_alike<TestType, WideTeam, kGeneral>(4, kManyClasses<TestType, WideTeam>, options);
}

TEST_CASE("equal rows of doubles give equal bits at every alignment") {
  check_all_kept<double, WarpTeam, RowWork::kPlain>(9, 513, {});
  check_all_kept<double, BlockTeam, RowWork::kPlain>(5, 2051, {});
}

TEMPLATE_TEST_CASE("logits and gradients may have any two alignments", "[asan]", c10::BFloat16,
                   float, double) {
  constexpr int kPerBlock = 16 / sizeof(TestType);
  for (int apart = 0; apart < kPerBlock; ++apart) {
    CAPTURE(apart);
    Options options;
    options.grad_offset = apart;
    // All rows begin on a boundary, as with a padded vocabulary.
    options.padding = kPerBlock + kPerBlock - 1027 % kPerBlock;
    for (const int kept_pieces : {0, 1, 9}) {
      options.kept_pieces = kept_pieces;
      run_and_check<TestType, WarpTeam>(3, 1027, 0, options);
    }
    options.padding = 5;
    run_and_check<TestType, WarpTeam>(3, 19, 3, options);
    options.kept_pieces = 1;
    run_and_check<TestType, BlockTeam>(2, 4101, 1, options);
    options.label_smoothing = 0.1;
    run_and_check<TestType, BlockTeam>(2, 4101, 1, options);
  }
}

TEMPLATE_TEST_CASE("logits and gradients of few classes may have any two alignments", "[asan]",
                   c10::BFloat16, float) {
  // The last row ends where its allocation ends, at every distance from a boundary.
  for (size_t offset = 0; offset < 16 / sizeof(TestType); ++offset) {
    Options options;
    options.grad_offset = 3;
    for (const int classes : {1, 8, 9, 121}) {
      run_and_check<TestType, FewLanes>(33, classes, offset, options);
    }
  }
}

TEMPLATE_TEST_CASE("rows may be read and overwritten in every schedule", "", c10::BFloat16, float) {
  simt::for_each_schedule([] {
    INFO(simt::schedule().name());
    for (const bool in_place : {false, true}) {
      Options options;
      options.in_place = in_place;
      options.padding = in_place ? 0 : 6;
      run_and_check<TestType, FewLanes>(70, 127, 1, options);
      run_and_check<TestType, WarpTeam>(35, 531, 1, options);
      run_and_check<TestType, BlockTeam>(5, 2501, 3, options);
      run_and_check<TestType, WideTeam>(5, 5003, 3, options);
    }
  });
}
