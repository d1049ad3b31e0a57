// 16-bit gradients of float logits, which linear_cross_entropy uses as factors of its products.
#include "simt/simt.h"

#include "cross_entropy_exact.h"

#include <cstring>

#include "catch.h"

using ampfuse::RowWork;

namespace {

// Returns options for rows as in a chunk: each begins on a boundary for any number of classes.
Options in_chunks(int classes) {
  Options options;
  options.padding = 64 - classes % 64;
  return options;
}

}  // namespace

TEMPLATE_TEST_CASE("16-bit gradients of float logits are the exact ones, rounded once", "",
                   c10::Half, c10::BFloat16) {
  simt::for_each_schedule([] {
    INFO(simt::schedule().name());
    for (const int classes : {1, 7, 65, 128}) {
      run_and_check<float, FewLanes, TestType>(20, classes, 0, in_chunks(classes));
    }
    for (const int classes : {3, 257, 1027}) {
      run_and_check<float, WarpTeam, TestType>(9, classes, 0, in_chunks(classes));
    }
    run_and_check<float, BlockTeam, TestType>(3, 4103, 0, in_chunks(4103));
    run_and_check<float, WideTeam, TestType>(3, 5003, 0, in_chunks(5003));
  });
  run_and_check<float, WidestTeam, TestType>(2, 8191, 0, in_chunks(8191));
}

TEST_CASE("float logits and their 16-bit gradients may have any two alignments", "[asan]") {
  using grad_t = c10::BFloat16;
  for (int offset = 0; offset < 4; ++offset) {
    for (int grad_offset = 0; grad_offset < 8; ++grad_offset) {
      CAPTURE(offset, grad_offset);
      Options options;
      options.grad_offset = grad_offset;
      for (const int kept_pieces : {0, 1, 9}) {
        options.kept_pieces = kept_pieces;
        run_and_check<float, WarpTeam, grad_t>(3, 535, offset, options);
      }
    }
  }
}

TEST_CASE("16-bit gradients of float logits are exact, rounded, with every option") {
  for (const Options& options : each_by_itself(in_chunks(301))) {
    run_and_check<float, WarpTeam, c10::BFloat16>(6, 301, 0, options);
    run_and_check<float, BlockTeam, c10::Half>(3, 301, 0, options);
  }
}

TEST_CASE("backward gives the 16-bit gradients of forward") {
  Options options = in_chunks(1027);
  Batch<float, c10::BFloat16> batch(9, 1027, 0, options);
  forward_on_host<float, WarpTeam, RowWork::kPlain>(batch);
  FakeTensor<c10::BFloat16> grad(batch.grad.size, 0);
  const double upstream = batch.baked;
  simt::launch(
      ampfuse::cross_entropy_backward_kernel<float, WarpTeam, RowWork::kPlain, c10::BFloat16>,
      kGrid, WarpTeam::kBlock, 0, batch.table(), batch.statistics.data(), &batch.divisor, &upstream,
      false, grad.data(), batch.rows_at(1027));
  CHECK(std::memcmp(grad.data(), batch.grad.data(), grad.size * sizeof(c10::BFloat16)) == 0);
}

TEST_CASE("the total kernel adds up target weights and reports a bad target") {
  Options options;
  options.weighted = true;
  Batch<float> batch(1500, 3, 0, options);
  batch.targets[7] = 3;
  simt::launch(ampfuse::cross_entropy_weigh_kernel<float>, batch.weights.size(), ampfuse::kThreads,
               0, batch.table(), batch.weights.data(), &batch.finished);
  ampfuse::CrossEntropyReduction reduction = batch.reduction();
  reduction.grad_scale = nullptr;
  reduction.baked_scale = nullptr;
  simt::launch(ampfuse::cross_entropy_total_kernel<float>, 1, ampfuse::kThreads, 0, batch.table(),
               reduction);
  double weight = 0;
  for (size_t row = 0; row < batch.targets.size(); ++row) {
    if (batch.targets[row] != kIgnored && row != 7) weight += batch.weight[batch.targets[row]];
  }
  CHECK(std::fabs(batch.divisor - weight) <= 1e-12 * weight);
  CHECK(batch.bad_target.is_set == 1);
  CHECK(batch.bad_target.row == 7);
  CHECK(batch.bad_target.target == 3);
}
