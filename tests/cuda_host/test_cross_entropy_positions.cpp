// Rows at spatial positions: their classes are far apart in memory, and a thread processes each
// row.
#include "simt/simt.h"

#include "cross_entropy_exact.h"

#include "catch.h"

using ampfuse::PositionTeam;

namespace {

Options of_positions(int64_t positions) {
  Options options;
  options.positions = positions;
  return options;
}

}  // namespace

TEMPLATE_TEST_CASE("rows at positions have the exact loss and gradient, rounded", "", c10::Half,
                   c10::BFloat16, float, double) {
  simt::for_each_schedule([] {
    INFO(simt::schedule().name());
    // Class counts on both sides of a pack, and more than are kept.
    for (const int classes : {1, 2, 7, 8, 9, 21, 70}) {
      run_and_check<TestType, PositionTeam>(3 * 37, classes, classes % 4, of_positions(37));
    }
  });
}

TEMPLATE_TEST_CASE("rows at positions are right however many of their packs are kept", "",
                   c10::BFloat16, float) {
  Options options = of_positions(300);
  for (const int pieces : {0, 1, 2, 9}) {
    CAPTURE(pieces);
    options.kept_pieces = pieces;
    run_and_check<TestType, PositionTeam>(600, 21, 1, options);
  }
}

TEMPLATE_TEST_CASE("losses of rows at positions match the reference with every option", "",
                   c10::BFloat16, float, double) {
  std::vector<Options> all = each_by_itself(of_positions(20));
  all.push_back(of_positions(20));
  all.back().in_place = true;
  all.push_back({0.2, 1e-2, 10, true, true, true});
  all.back().positions = 20;
  for (const Options& options : all) run_and_check<TestType, PositionTeam>(60, 21, 1, options);
}
