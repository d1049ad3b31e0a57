// Rows of 16-bit logits that the blocks of a cluster hold in registers.
#include "cross_entropy_exact.h"

#include "catch.h"

TEST_CASE("rows of clusters have the exact loss and gradient, rounded, at every size", "[asan]") {
  for (const Type type : {kHalf, kBFloat16}) {
    for (const int blocks : {2, 4, 8}) {
      const int most = most_held(Team::kCluster) * blocks;
      // With few classes, the last blocks have no share of a row.
      for (const int classes : {1, 7, 8, 9, 8 * blocks - 1, 8 * blocks + 1, 777, most / 2 + 1,
                                most - 7 * blocks, most - 1, most}) {
        Options options = {.cluster_blocks = blocks};
        run_and_check(type, Team::kCluster, 3, classes, 0, options);
        run_and_check(type, Team::kCluster, 3, classes, classes % 8, options);
        options.in_place = true;
        run_and_check(type, Team::kCluster, 3, classes, classes % 8, options);
      }
    }
  }
  run_and_check(kBFloat16, Team::kWideCluster, 2, 128256, 0, {.cluster_blocks = 8});
  run_and_check(kBFloat16, Team::kWideCluster, 2, 50257, 0, {.cluster_blocks = 4});
}

TEST_CASE("rows of clusters are right in every schedule") {
  simt::for_each_schedule([] {
    for (const bool in_place : {false, true}) {
      // Nine rows take each of two clusters twice through both arrays of numbers.
      const Options options = {.in_place = in_place, .cluster_blocks = 2};
      run_and_check(kBFloat16, Team::kCluster, 9, 2043, 3, options);
      run_and_check(kBFloat16, Team::kCluster, 9, 4096, 0, options);
      run_and_check(kBFloat16, Team::kCluster, 9, 5001, 1,
                    {.in_place = in_place, .cluster_blocks = 4});
    }
  });
}

TEST_CASE("logits and gradients of clusters may have any two alignments", "[asan]") {
  for (int offset = 0; offset < 8; ++offset) {
    for (int grad_offset = 0; grad_offset < 8; ++grad_offset) {
      run_and_check(kBFloat16, Team::kCluster, 3, 1003, offset,
                    {.cluster_blocks = 2, .padding = 5, .grad_offset = grad_offset});
    }
  }
}

TEST_CASE("logits of one block of a cluster may be far from those of others", "[asan]") {
  for (const Type type : {kHalf, kBFloat16}) {
    for (const double size : {20.0, 100.0, 300.0, 30000.0, 1e20, 3e38, HUGE_VAL}) {
      for (const double far : {size, -size}) {
        if (far == HUGE_VAL || (type == kHalf && size > 65504 && size < HUGE_VAL)) continue;
        // The second share of 400 classes, one class of the last, and all shares but the first.
        for (const auto& [first, end] : {std::pair(400, 800), {1500, 1501}, {400, 1600}}) {
          CAPTURE(far, first);
          check_logits(type, Team::kCluster, 3, 1600,
                       [&](int64_t row, int c, int64_t target) {
                         return c >= first && c < end && c != target ? far : moderate(row, c);
                       },
                       {.cluster_blocks = 4});
        }
      }
    }
    check_no_distribution(type, Team::kCluster, 1600, {.cluster_blocks = 4});
  }
}

TEST_CASE("equal rows of clusters give equal bits, whatever their alignment", "[asan]") {
  // An odd number of classes: rows have all alignments.
  check_rows_alike(kBFloat16, Team::kCluster, 9, 2003, {.cluster_blocks = 2});
}
