// The kernels of cross_entropy: values against long double, memory and races under sanitizers.
#include "simt/simt.h"

#include "cross_entropy_on_host.h"

#include <cmath>
#include <vector>

#include "catch.h"

using ampfuse::RowAcc;
using ampfuse::RowWork;
using ampfuse::WarpTeam;
using FewLanes = ampfuse::LaneTeam<8>;
using BlockTeam = ampfuse::BlockTeam<256>;
using WideTeam = ampfuse::BlockTeam<512>;

namespace {

template <typename scalar_t>
void check(Batch<scalar_t>& batch, const std::vector<scalar_t>& logits) {
  using acc_t = RowAcc<scalar_t>;
  const long double unit = std::is_same_v<acc_t, double> ? 1e-14L : 1e-6L;
  constexpr long double kReference = 1e-17L;  // by how much long double itself is off
  long double total = 0;
  int misses = 0;
  for (int64_t row = 0; row < batch.rows; ++row) {
    const Exact<scalar_t> exact(batch, logits, row);
    total += exact.loss;
    const auto miss = [](long double got, long double expected, long double allowed) {
      return !(std::fabs(got - expected) <= allowed);  // what was never written is no number
    };
    misses += miss(batch.losses[row], exact.loss, unit * (std::fabs(exact.loss) + 1));
    if (batch.options.metrics) {
      misses += miss(batch.lse[row], exact.lse, unit * (std::fabs(exact.lse) + 1));
      misses += miss(batch.entropy[row], exact.entropy, 8 * unit * (exact.entropy + 1));
      misses += batch.argmax[row] != exact.argmax;
    }
    for (int c = 0; c < batch.classes; ++c) {
      const auto got = static_cast<double>(batch.gradient()[row * batch.classes + c]);
      const long double allowed =
          // Doubles are computed with doubles alone, where z − m is rounded.
          last_place<scalar_t>(exact.gradient[c]) * (std::is_same_v<scalar_t, double> ? 100 : 1) +
          (batch.options.is_plain() ? kReference : unit * 2) * exact.largest_term[c];
      misses += !(std::fabs(got - exact.gradient[c]) <= allowed);
    }
  }
  CHECK(misses == 0);
  CHECK(std::fabs(batch.loss - total / batch.divisor) <= unit * 4 * std::fabs(total) + kReference);
}

template <typename scalar_t, typename Team>
void run_and_check(int64_t rows, int classes, int64_t offset, const Options& options) {
  CAPTURE(rows, classes, offset, sizeof(scalar_t));
  Batch<scalar_t> batch(rows, classes, offset, options);
  const std::vector<scalar_t> logits(batch.logits.data(), batch.logits.data() + rows * classes);
  options.is_plain() ? forward_on_host<scalar_t, Team, RowWork::kPlain>(batch)
                     : forward_on_host<scalar_t, Team, RowWork::kAny>(batch);
  check(batch, logits);
}

template <typename scalar_t, typename Team, size_t kSizes>
void check_team(int64_t rows, const int (&sizes)[kSizes]) {
  simt::for_each_schedule([&] {
    INFO(simt::schedule().name());
    for (const int classes : sizes) {
      run_and_check<scalar_t, Team>(rows, classes, classes % 4, {});
    }
  });
}

// On both sides of all that a team counts by: a head, a pack per lane, four of them, what is kept.
const int kFewClasses[] = {1, 2, 7, 10, 65, 128};
const int kWarpClasses[] = {1, 2, 7, 31, 257, 520, 1027};
const int kBlockClasses[] = {5, 2049, 8200, 9001};
const int kWideClasses[] = {4095, 9001};

}  // namespace

TEMPLATE_TEST_CASE("a few lanes' rows have the exact loss and gradient, rounded", "", c10::Half,
                   c10::BFloat16, float) {
  check_team<TestType, FewLanes>(70, kFewClasses);
}

TEMPLATE_TEST_CASE("a warp's rows have the exact loss and gradient, rounded", "", c10::Half,
                   c10::BFloat16, float, double) {
  check_team<TestType, WarpTeam>(9, kWarpClasses);
}

TEMPLATE_TEST_CASE("a block's rows have the exact loss and gradient, rounded", "", c10::Half,
                   c10::BFloat16, float, double) {
  check_team<TestType, BlockTeam>(3, kBlockClasses);
}

TEMPLATE_TEST_CASE("a wide block's rows have the exact loss and gradient, rounded", "", c10::Half,
                   c10::BFloat16, float) {
  check_team<TestType, WideTeam>(3, kWideClasses);
}

TEMPLATE_TEST_CASE("it does not matter how much of a row is kept", "", c10::BFloat16, float) {
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
  }
}

TEMPLATE_TEST_CASE("losses of rows that are sure of their target keep their digits", "", c10::Half,
                   c10::BFloat16, float) {
  // All others alike, so that what each exponential is off by does not average out.
  for (int ahead = 16; ahead < 80; ++ahead) {
    CAPTURE(ahead);
    Batch<TestType> batch(1, 41, 1, {});
    std::fill_n(batch.logits.data(), batch.classes, as_element<TestType>(0.5));
    batch.logits.data()[batch.targets[0]] = as_element<TestType>(0.5 + 0.375 * ahead);
    forward_on_host<TestType, WarpTeam, RowWork::kPlain>(batch);
    const double exact = std::log1p(40 * std::exp(-0.375 * ahead));
    CHECK(std::fabs(batch.losses[0] - exact) <= 1e-6 * exact);
  }
}

TEMPLATE_TEST_CASE("the first of equal logits is the largest", "", c10::BFloat16, float) {
  const auto argmax = [](int first, int second, double value) {
    Options options;
    options.metrics = true;
    Batch<TestType> batch(1, 301, 0, options);
    std::fill_n(batch.logits.data(), batch.classes, as_element<TestType>(0.0));
    batch.logits.data()[first] = as_element<TestType>(value);
    batch.logits.data()[second] = as_element<TestType>(value);
    forward_on_host<TestType, WarpTeam, RowWork::kAny>(batch);
    return batch.argmax[0];
  };
  // Heads, packs and tails are looked at in another order than that of classes.
  for (const double value : {0.0, 7.0, double(NAN)}) {
    CAPTURE(value);
    CHECK(argmax(0, 300, value) == 0);
    CHECK(argmax(5, 296, value) == (value == 0 ? 0 : 5));
    CHECK(argmax(299, 300, value) == (value == 0 ? 0 : 299));
  }
}

TEST_CASE("what targets weigh does not depend on who looks at them") {
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

TEMPLATE_TEST_CASE("logits may be overwritten with their gradient", "", c10::BFloat16, float) {
  simt::for_each_schedule([] {
    INFO(simt::schedule().name());
    Options options;
    options.in_place = true;
    run_and_check<TestType, WarpTeam>(17, 530, 1, options);
    run_and_check<TestType, BlockTeam>(3, 2500, 3, options);
  });
}

TEMPLATE_TEST_CASE("everything else that a loss may be made of", "", c10::BFloat16, float, double) {
  std::vector<Options> all(6);
  all[0].weighted = true;
  all[1].label_smoothing = 0.1;
  all[2].probabilities = true;
  all[2].weighted = true;
  all[3].z_loss = 1e-3;
  all[3].softcap = 20;
  all[4].metrics = true;
  all[5] = {0.2, 1e-2, 10, true, true, true, true, 3};
  for (const Options& options : all) {
    run_and_check<TestType, WarpTeam>(6, 301, 1, options);
    run_and_check<TestType, BlockTeam>(3, 2303, 2, options);
  }
}

TEST_CASE("backward from what forward knows of rows is forward's gradient") {
  simt::for_each_schedule([] {
    Batch<float> batch(6, 700, 0, {});
    forward_on_host<float, WarpTeam, RowWork::kPlain>(batch);
    FakeTensor<float> grad(batch.rows * batch.classes, 0);
    const double upstream = batch.baked;
    simt::launch(ampfuse::cross_entropy_backward_kernel<float, WarpTeam, RowWork::kPlain>, 2,
                 ampfuse::kThreads, 0, batch.table(), batch.statistics.data(), &batch.divisor,
                 &upstream, false, grad.data());
    for (int64_t i = 0; i < batch.rows * batch.classes; ++i) {
      REQUIRE(grad.data()[i] == batch.grad.data()[i]);
    }
  });
}

TEST_CASE("a target that is no class makes its row no number, and is told") {
  Batch<float> batch(5, 40, 0, {});
  batch.targets = {3, 40, kIgnored, -1, 7};
  forward_on_host<float, WarpTeam, RowWork::kPlain>(batch);
  CHECK(batch.complaint.is_set == 1);
  CHECK(batch.complaint.row == 1);
  CHECK(batch.complaint.target == 40);
  CHECK(std::isfinite(batch.losses[0]));
  CHECK(std::isnan(batch.losses[1]));
  CHECK(batch.losses[2] == 0);
  CHECK(std::isnan(batch.losses[3]));
  CHECK(std::isnan(batch.loss));
}

TEST_CASE("a gradient is rescaled for another upstream one, and else left alone") {
  simt::for_each_schedule([] {
    auto grad = random_tensor<c10::BFloat16>(7 * 261, 3, 5);
    const std::vector<c10::BFloat16> before(grad.data(), grad.data() + grad.size);
    const float baked = 8;
    for (const float upstream : {8.0f, 3.0f}) {
      simt::launch(ampfuse::cross_entropy_rescale_kernel<c10::BFloat16>, 2, ampfuse::kThreads, 0,
                   grad.data(), int64_t(261), int64_t(7), 261, &baked, &upstream);
      for (int64_t i = 0; i < grad.size; ++i) {
        const auto expected =
            static_cast<c10::BFloat16>(static_cast<float>(before[i]) * (upstream / baked));
        REQUIRE(static_cast<float>(grad.data()[i]) == static_cast<float>(expected));
      }
    }
  });
}

TEST_CASE("what a scale has to be to be multiplied by") {
  for (const float scale : {0.0f, INFINITY, NAN}) {
    Options options;
    options.scale = scale;
    Batch<float> batch(4, 30, 0, options);
    forward_on_host<float, WarpTeam, RowWork::kPlain>(batch);
    CHECK(batch.baked == 1);
  }
}
