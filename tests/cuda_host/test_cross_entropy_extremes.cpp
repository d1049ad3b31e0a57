// Logits far from 0 and far from each other: exponentials relative to the first reference that a
// kernel tries may overflow, or all be 0.
#include "simt/simt.h"

#include "cross_entropy_exact.h"

#include <cmath>
#include <vector>

#include "catch.h"

using ampfuse::RowWork;

namespace {

// Checks rows that are kept not at all and partly.
template <typename scalar_t, typename Logit>
void check_everywhere(const Logit& logit) {
  for (const int kept_pieces : {0, 2}) {
    Options options;
    options.kept_pieces = kept_pieces;
    check_logits<scalar_t, FewLanes, RowWork::kPlain>(9, 77, logit, options);
    check_logits<scalar_t, WarpTeam, RowWork::kPlain>(5, 531, logit, options);
    check_logits<scalar_t, WarpTeam, RowWork::kGeneral>(5, 531, logit, options);
    check_logits<scalar_t, BlockTeam, RowWork::kPlain>(3, 4101, logit, options);
  }
}

// Moderate logits, different for each class.
double moderate(int64_t row, int c) {
  return 3 * std::sin(0.7 * static_cast<double>(row) + 1.3 * c);
}

}  // namespace

TEMPLATE_TEST_CASE("logits near any number have the exact loss and gradient, rounded", "[asan]",
                   c10::Half, c10::BFloat16, float) {
  constexpr bool kIsHalf = std::is_same_v<TestType, c10::Half>;
  const double step = kIsHalf ? 0x1p-10 : std::is_same_v<TestType, float> ? 0x1p-23 : 0x1p-7;
  std::vector<double> sizes = {20, 60, 300, 2500, 30000};
  if (!kIsHalf) sizes.insert(sizes.end(), {0x1p16, 1e20, 3e38});
  for (const double size : sizes) {
    for (const double around : {size, -size}) {
      CAPTURE(around);
      // Neighbouring numbers of this type.
      check_everywhere<TestType>([&](int64_t row, int c, int64_t) {
        return around * (1 + step * static_cast<double>((7 * row + 13 * c) % 4));
      });
    }
  }
}

TEMPLATE_TEST_CASE("the target may be far below or above all others", "[asan]", c10::Half,
                   c10::BFloat16, float) {
  std::vector<double> sizes = {20, 60, 100, 300, 30000};
  if (!std::is_same_v<TestType, c10::Half>) sizes.push_back(3.38e38);  // masks, near the limit
  for (const double size : sizes) {
    for (const double target_logit : {size, -size}) {
      CAPTURE(target_logit);
      check_everywhere<TestType>([&](int64_t row, int c, int64_t target) {
        return c == target ? target_logit : moderate(row, c);
      });
    }
  }
}

TEMPLATE_TEST_CASE("a class may be far above the target and the others", "", c10::Half,
                   c10::BFloat16, float) {
  for (const double size : {20.0, 60.0, 100.0, 300.0, 30000.0}) {
    CAPTURE(size);
    check_everywhere<TestType>([&](int64_t row, int c, int64_t target) {
      return c == (target + 1) % 77 ? size : moderate(row, c);
    });
  }
}

TEMPLATE_TEST_CASE("a target of -inf has an infinite loss, and the gradient of a softmax", "",
                   c10::Half, c10::BFloat16, float) {
  for (const double around : {0.0, -300.0, 300.0}) {
    CAPTURE(around);
    Batch<TestType> batch(1, 531, 1, {});
    for (int c = 0; c < batch.classes; ++c) {
      batch.logit(0, c) = as_element<TestType>(around + moderate(0, c));
    }
    batch.logit(0, batch.targets[0]) = as_element<TestType>(-HUGE_VAL);
    const std::vector<TestType> logits = batch.dense_logits();
    forward_on_host<TestType, WarpTeam, RowWork::kPlain>(batch);
    CHECK(batch.losses[0] == HUGE_VALF);
    long double sum = 0;
    for (const TestType x : logits) sum += std::exp(static_cast<long double>(float(x)) - around);
    int misses = 0;
    for (int c = 0; c < batch.classes; ++c) {
      if (c == batch.targets[0]) continue;
      const long double p =
          std::exp(static_cast<long double>(float(logits[c])) - around) / sum * batch.baked;
      misses += !(std::fabs(float(batch.gradient_of(0, c)) - p) <=
                  kUlps<TestType> * last_place<TestType>(p));
    }
    CHECK(misses == 0);
  }
}
