// Rows of logits at every distance from a 16-byte boundary, which may differ from that of other
// rows and of their gradients.
#include "cross_entropy_exact.h"

#include "catch.h"

using ampfuse::RowWork;

namespace {

// Checks rows that are kept not at all, partly and completely, the last also in place.
void check_all_kept(Type type, Team team, int64_t rows, int classes, Options options = {}) {
  for (const int kept_pieces : {0, 1, 9}) {
    options.kept_pieces = kept_pieces;
    check_rows_alike(type, team, rows, classes, options);
  }
  options.in_place = true;
  check_rows_alike(type, team, rows, classes, options);
}

// Returns a number of classes for a team: all that it has in flight at once, some more, and single
// ones.
int many_classes(Type type, Team team) {
  return static_cast<int>(4 * static_cast<int>(team) * 16 / size_of(type)) + 307;
}

}  // namespace

TEST_CASE("equal rows give equal bits at every alignment", "[asan]") {
  check_all_kept(kFloat, Team::kFewLanes, 70, 127);
  for (const Team team : {Team::kWarp, Team::kBlock}) {
    check_all_kept(kFloat, team, team == Team::kWarp ? 19 : 5, many_classes(kFloat, team));
    check_all_kept(kDouble, team, team == Team::kWarp ? 9 : 5, many_classes(kDouble, team));
  }
  for (const Type type : {kBFloat16, kFloat}) {
    const Options options = {.work = RowWork::kPlain};
    check_rows_alike(type, Team::kWide, 4, many_classes(type, Team::kWide), options);
    check_rows_alike(type, Team::kWidest, 3, many_classes(type, Team::kWidest), options);
  }
}

TEST_CASE("equal held rows give equal bits at every alignment", "[asan]") {
  for (const bool in_place : {false, true}) {
    const Options options = {.in_place = in_place};
    check_rows_alike(kBFloat16, Team::kFewLanes, 70, 253, options);
    check_rows_alike(kHalf, Team::kWarp, 19, 1021, options);
    check_rows_alike(kBFloat16, Team::kWarp, 19, 1021, options);
    check_rows_alike(kBFloat16, Team::kBlock64, 9, 2045, options);
    check_rows_alike(kBFloat16, Team::kBlock128, 9, 2051, options);
    check_rows_alike(kBFloat16, Team::kBlock, 9, 5001, options);
    check_rows_alike(kBFloat16, Team::kWide, 9, 9001, options);
    const Options twice = {.in_place = in_place, .work = RowWork::kHeldTwice};
    check_rows_alike(kBFloat16, Team::kHalfWarp, 19, 1021, twice);
  }
}

TEST_CASE("equal rows give equal bits at every alignment with all options", "[asan]") {
  for (const Type type : {kBFloat16, kFloat}) {
    Options options = {.label_smoothing = 0.1, .z_loss = 1e-3, .softcap = 30};
    options.weighted = options.metrics = true;
    check_all_kept(type, Team::kWarp, 9, many_classes(type, Team::kWarp), options);
    check_rows_alike(type, Team::kBlock, 5, many_classes(type, Team::kBlock), options);
    options.probabilities = true;
    check_rows_alike(type, Team::kWide, 4, many_classes(type, Team::kWide), options);
  }
}

TEST_CASE("logits and gradients may have any two alignments", "[asan]") {
  // The last row ends where its allocation ends. Rows are further apart than they are long.
  const auto check_all = [](Type type, Team team, int64_t rows, const std::vector<int>& sizes,
                            Options options) {
    const Type grad_type = options.grad_type.value_or(type);
    for (int64_t offset = 0; offset < 16 / size_of(type); ++offset) {
      for (int64_t grad_offset = 0; grad_offset < 16 / size_of(grad_type); ++grad_offset) {
        options.grad_offset = grad_offset;
        for (const int classes : sizes) run_and_check(type, team, rows, classes, offset, options);
      }
    }
  };
  check_all(kBFloat16, Team::kFewLanes, 5, {1, 16, 23, 250}, {});
  check_all(kBFloat16, Team::kWarp, 3, {1000}, {.padding = 5});
  check_all(kFloat, Team::kFewLanes, 33, {1, 8, 9, 121}, {});
  for (const int kept_pieces : {0, 1, 9}) {
    const Options options = {.kept_pieces = kept_pieces, .padding = 5};
    check_all(kFloat, Team::kWarp, 3, {19, 1027}, options);
    check_all(kDouble, Team::kWarp, 3, {19, 1027}, options);
    check_all(kFloat, Team::kWarp, 3, {535}, {.kept_pieces = kept_pieces, .grad_type = kBFloat16});
  }
  for (const Type type : {kFloat, kDouble}) {
    check_all(type, Team::kBlock, 2, {4101}, {.padding = 5});
    check_all(type, Team::kBlock, 2, {1029}, {.label_smoothing = 0.1, .padding = 5});
  }
}

TEST_CASE("long 16-bit rows and their gradients may have any two alignments", "[asan]") {
  for (const int64_t apart : {0, 1, 2, 3, 4, 5, 6, 7}) {
    // All rows of logits begin on a boundary, as with a padded vocabulary.
    Options options = {.padding = 13, .grad_offset = apart, .work = RowWork::kPlain};
    for (const int kept_pieces : {0, 1}) {
      options.kept_pieces = kept_pieces;
      run_and_check(kBFloat16, Team::kWide, 3, 1027, 0, options);
    }
    options.padding = 5;
    run_and_check(kBFloat16, Team::kWide, 2, 8197, 1, options);
    options.work = RowWork::kGeneral;
    options.label_smoothing = 0.1;
    run_and_check(kBFloat16, Team::kBlock, 2, 4101, 1, options);
    run_and_check(kBFloat16, Team::kWarp, 3, 19, 3, options);
  }
}
