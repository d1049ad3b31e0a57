// The kernels of cross_entropy: values compared with long double, memory and races under
// sanitizers.
#include "cross_entropy_exact.h"

#include "catch.h"

using ampfuse::RowWork;

namespace {

// Rows as in a chunk of linear_cross_entropy, whose 16-bit gradients are factors of its products:
// each begins on a boundary for any number of classes.
Options in_chunks(int classes, Type grad_type) {
  return {.padding = 64 - classes % 64, .grad_type = grad_type};
}

// Rows at spatial positions: their classes are far apart in memory, and a thread processes each.
const Options kAtPositions = {.positions = 37};

}  // namespace

TEST_CASE("rows may be read and overwritten in every schedule") {
  simt::for_each_schedule([] {
    const Options features = with_features({}).back();
    for (const Type type : {kBFloat16, kFloat}) {
      for (const bool in_place : {false, true}) {
        // A thread reads logits that were not kept again, when others may write the gradient there.
        for (const int kept_pieces : {0, 2}) {
          Options options = {.in_place = in_place, .padding = in_place ? 0 : 6};
          if (type == kFloat) options.kept_pieces = kept_pieces;
          if (type == kBFloat16 && kept_pieces == 0) options.work = RowWork::kPlain;
          if (in_place) run_and_check(type, Team::kWide, 5, 5003, 3, options);
          if (options.work) continue;
          run_and_check(type, Team::kFewLanes, 70, 127, 1, options);
          run_and_check(type, Team::kWarp, 35, 531, 1, options);
          run_and_check(type, Team::kBlock, 5, 2501, 3, options);
        }
      }
      run_and_check(type, Team::kWarp, 6, 301, 1, features);
      run_and_check(type, Team::kBlock, 3, 2303, 2, features);
      run_and_check(type, Team::kPosition, 111, 21, 1, kAtPositions);
    }
    run_and_check(kFloat, Team::kBlock, 3, 2501, 0, in_chunks(2501, kBFloat16));
    run_and_check(kBFloat16, Team::kBlock64, 5, 2043, 3, {});
  });
}

TEST_CASE("rows have the exact loss and gradient, rounded", "[asan]") {
  struct Rows {
    Team team;
    int64_t rows;
    // On both sides of each unit of a team: single classes, a pack per lane, all packs that a lane
    // has in flight, the part of a row that is held or kept.
    std::vector<int> classes;
    std::vector<Type> types;
  };
  const std::vector<Rows> all = {
      {Team::kPosition, 111, {1, 2, 7, 8, 9, 21, 70}, {kHalf, kBFloat16, kFloat, kDouble}},
      {Team::kFewLanes, 70, {1, 2, 7, 10, 65, 128}, {kHalf, kBFloat16, kFloat}},
      {Team::kWarp, 9, {1, 2, 7, 31, 257, 520, 1021}, {kHalf, kBFloat16, kFloat, kDouble}},
      {Team::kBlock128, 5, {2501}, {kBFloat16}},
      {Team::kBlock, 3, {5, 2049, 8189}, {kHalf, kBFloat16, kFloat, kDouble}},
      {Team::kWide, 3, {4095, 9001}, {kBFloat16, kFloat}},
      {Team::kWide, 3, {16387}, {kHalf, kBFloat16}},  // too long to be held
      {Team::kWidest, 3, {8191}, {kFloat}}};
  for (const bool in_place : {false, true}) {
    run_and_check(kFloat, Team::kWarp, 9, 1021, 1, {.in_place = in_place, .quick_ulps = 16});
    run_and_check(kFloat, Team::kBlock, 3, 2501, 3, {.in_place = in_place, .quick_ulps = 16});
  }
  for (const auto& [team, rows, sizes, types] : all) {
    for (const Type type : types) {
      for (const int classes : sizes) {
        const Options options = team == Team::kPosition ? kAtPositions : Options();
        run_and_check(type, team, rows, classes, classes % 4, options);
      }
    }
  }
}

TEST_CASE("16-bit gradients of float logits are the exact ones, rounded once", "[asan]") {
  const std::vector<std::tuple<Team, int64_t, int>> all = {
      {Team::kFewLanes, 20, 1},   {Team::kFewLanes, 20, 7}, {Team::kFewLanes, 20, 65},
      {Team::kFewLanes, 20, 128}, {Team::kWarp, 9, 3},      {Team::kWarp, 9, 257},
      {Team::kWarp, 9, 1027},     {Team::kBlock, 3, 4103},  {Team::kWide, 3, 5003},
      {Team::kWidest, 2, 8191}};
  for (const Type type : {kHalf, kBFloat16}) {
    for (const auto& [team, rows, classes] : all) {
      run_and_check(kFloat, team, rows, classes, 0, in_chunks(classes, type));
    }
  }
  for (const Options& options : with_features(in_chunks(301, kBFloat16))) {
    run_and_check(kFloat, Team::kWarp, 6, 301, 0, options);
  }
  for (const Options& options : with_features(in_chunks(301, kHalf))) {
    run_and_check(kFloat, Team::kBlock, 3, 301, 0, options);
  }
}

TEST_CASE("loss and gradient are right however many packs of a row are kept", "[asan]") {
  for (const int pieces : {0, 1, 2, 9}) {
    Options options = {.kept_pieces = pieces, .work = RowWork::kPlain};
    for (const bool in_place : {false, true}) {
      options.in_place = in_place;
      run_and_check(kFloat, Team::kFewLanes, 40, 127, 1, options);
      run_and_check(kFloat, Team::kWarp, 9, 1027, 2, options);
      run_and_check(kFloat, Team::kBlock, 3, 9001, 3, options);
      for (const Type type : {kBFloat16, kFloat}) {
        run_and_check(type, Team::kWide, 3, 9001, 3, options);
      }
    }
    options.in_place = false;
    for (const Type type : {kHalf, kBFloat16, kFloat}) {
      run_and_check(type, Team::kWidest, 2, 17001, 3, options);
    }
    options.positions = 300;
    run_and_check(kBFloat16, Team::kPosition, 600, 21, 1, options);
    run_and_check(kFloat, Team::kPosition, 600, 21, 1, options);
  }
}

TEST_CASE("held rows of every size have the exact loss and gradient, rounded", "[asan]") {
  constexpr auto kHeld = RowWork::kHeld;
  constexpr auto kHeldTwice = RowWork::kHeldTwice;
  const std::tuple<Type, Team, RowWork, int64_t> all[] = {
      {kBFloat16, Team::kFewLanes, kHeld, 9},    {kHalf, Team::kWarp, kHeld, 5},
      {kBFloat16, Team::kWarp, kHeld, 5},        {kBFloat16, Team::kBlock64, kHeld, 3},
      {kBFloat16, Team::kBlock, kHeld, 3},       {kBFloat16, Team::kHalfWarp, kHeldTwice, 5},
      {kBFloat16, Team::kBlock64, kHeldTwice, 3}};
  for (const auto& [type, team, work, rows] : all) {
    const int most = most_held(team, work);
    // Around these numbers, a thread gets another pack, or a team is full.
    for (const int classes : {1, 7, 8, 9, 15, 17, 24, 25, most / 4 - 1, most / 4, most / 4 + 9,
                              most / 2 + 1, most - 7, most}) {
      Options options = {.work = work};
      run_and_check(type, team, rows, classes, 0, options);
      run_and_check(type, team, rows, classes, classes % 8, options);
      options.in_place = true;
      run_and_check(type, team, rows, classes, classes % 8, options);
    }
  }
  // Rows whose gradient is aligned need no shared memory.
  run_and_check(kBFloat16, Team::kWarp, 5, 1000, 0, {.kept_pieces = 0});
}

TEST_CASE("losses with every option match the reference", "[asan]") {
  for (const Type type : {kBFloat16, kFloat, kDouble}) {
    for (Options options : with_features({.kept_pieces = 3})) {
      run_and_check(type, Team::kWarp, 6, 301, 1, options);
      run_and_check(type, Team::kBlock, 3, 2303, 2, options);
      if (options.metrics) {
        options.in_place = true;
        run_and_check(type, Team::kWarp, 6, 301, 1, options);
      }
    }
    for (Options options : with_features({.positions = 20})) {
      run_and_check(type, Team::kPosition, 60, 21, 1, options);
      options.in_place = true;
      run_and_check(type, Team::kPosition, 60, 21, 1, options);
    }
  }
}

TEST_CASE("losses near 0 of confident rows have a relative error below 1e-6", "[asan]") {
  // All other logits are equal, so that the errors of their exponentials do not average out.
  const auto lead = [](int64_t row) { return 0.375 * static_cast<double>(16 + row); };
  for (const auto& [type, team] : {std::pair(kHalf, Team::kWarp),
                                   {kBFloat16, Team::kWarp},
                                   {kBFloat16, Team::kWide},
                                   {kFloat, Team::kWarp}}) {
    Batch batch(type, 64, 41, 1);
    if (team == Team::kWide) batch.options.work = RowWork::kPlain;
    for (int64_t row = 0; row < batch.rows; ++row) batch.targets[row] = row % batch.classes;
    batch.set_logits(
        [&](int64_t row, int c) { return c == batch.targets[row] ? 0.5 + lead(row) : 0.5; });
    forward_alone(batch, team);
    for (int64_t row = 0; row < batch.rows; ++row) {
      CAPTURE(row, type, team);
      const double exact = std::log1p(40 * std::exp(-lead(row)));
      CHECK(std::fabs(batch.losses[row] - exact) <= 1e-6 * exact);
    }
  }
}

TEST_CASE("tiny gradients keep digits that only a large scale makes visible", "[asan]") {
  const auto logit = [](int64_t, int c, int64_t target) {
    return c == target ? 50 : -38 - 0.25 * c;
  };
  for (const int kept : {0, 1}) {
    const Options options = {.scale = 0x1p127f, .kept_pieces = kept, .work = RowWork::kPlain};
    check_logits(kFloat, Team::kWarp, 1, 97, logit, options);
    check_logits(kHalf, Team::kWide, 1, 97, logit, options);
    check_logits(kBFloat16, Team::kWide, 1, 97, logit, options);
  }
  check_logits(kHalf, Team::kFewLanes, 1, 97, logit, {.scale = 0x1p127f});
  check_logits(kBFloat16, Team::kFewLanes, 1, 97, logit, {.scale = 0x1p127f});
}

TEST_CASE("argmax is the first of equal largest logits", "[asan]") {
  for (const Type type : {kBFloat16, kFloat}) {
    const auto argmax = [&](int first, int second, double value) {
      Batch batch(type, 1, 301, 0, {.metrics = true});
      batch.set_logits([&](int64_t, int c) { return c == first || c == second ? value : 0; });
      forward_alone(batch, Team::kWarp);
      return batch.argmax[0];
    };
    // Threads read packs in turn, and single classes after the last pack.
    for (const double value : {0.0, 7.0, double(NAN)}) {
      CAPTURE(type, value);
      CHECK(argmax(0, 300, value) == 0);
      CHECK(argmax(5, 296, value) == (value == 0 ? 0 : 5));
      CHECK(argmax(299, 300, value) == (value == 0 ? 0 : 299));
    }
  }
}
