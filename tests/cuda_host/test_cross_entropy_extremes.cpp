// Logits far from 0 and far from each other: exponentials relative to the first reference that a
// kernel tries may overflow, or all be 0.
#include "cross_entropy_exact.h"

#include <functional>
#include <limits>

#include "catch.h"

using ampfuse::RowWork;

namespace {

using Logit = std::function<double(int64_t row, int c, int64_t target)>;

// Checks rows of each team and kind of work: 16-bit logits that are held, and others that are kept
// not at all or partly.
void check_everywhere(Type type, const Logit& logit) {
  const Options not_kept = {.kept_pieces = 0, .work = RowWork::kPlain};
  const Options partly_kept = {.kept_pieces = 2, .work = RowWork::kPlain};
  if (type == kFloat) {
    check_logits(type, Team::kFewLanes, 9, 77, logit, not_kept);
    check_logits(type, Team::kWarp, 5, 531, logit, partly_kept);
    check_logits(type, Team::kBlock, 3, 4101, logit, partly_kept);
    check_logits(type, Team::kWarp, 5, 531, logit, {.quick_ulps = 64, .kept_pieces = 2});
  } else {
    check_logits(type, Team::kFewLanes, 9, 77, logit);
    check_logits(type, Team::kWarp, 5, 531, logit);
    check_logits(type, Team::kBlock64, 3, 1800, logit);
    check_logits(type, Team::kWide, 3, 2051, logit, not_kept);
  }
  if (type == kBFloat16) {  // rows that take less and more than half of their threads' registers
    const Options held_twice = {.work = RowWork::kHeldTwice};
    check_logits(type, Team::kHalfWarp, 5, 505, logit, held_twice);
    check_logits(type, Team::kBlock64, 3, 2100, logit, held_twice);
  }
  check_logits(type, Team::kWarp, 5, 531, logit, {.kept_pieces = 2, .work = RowWork::kGeneral});
}

// Returns numbers from moderate ones to the largest of a type.
std::vector<double> sizes_of(Type type) {
  if (type == kHalf) return {20, 60, 100, 300, 30000};
  return {20, 60, 100, 300, 30000, 0x1p16, 3.38e38};
}

}  // namespace

TEST_CASE("logits near any number have the exact loss and gradient, rounded", "[asan]") {
  for (const Type type : {kHalf, kBFloat16, kFloat}) {
    const double step = type == kHalf ? 0x1p-10 : type == kFloat ? 0x1p-23 : 0x1p-7;
    for (const double size : {20.0, 300.0, 2500.0, 30000.0, 1e20, 3e38}) {
      if (type == kHalf && size > 65504) continue;
      for (const double around : {size, -size}) {
        CAPTURE(around);
        // Neighbouring numbers of this type.
        check_everywhere(type, [&](int64_t row, int c, int64_t) {
          return around * (1 + step * static_cast<double>((7 * row + 13 * c) % 4));
        });
      }
    }
  }
}

TEST_CASE("some logits of a row may be far below or above the others", "[asan]") {
  const std::pair<const char*, std::function<bool(int c, int64_t target)>> patterns[] = {
      {"the target", [](int c, int64_t target) { return c == target; }},
      {"the class after the target", [](int c, int64_t target) { return c == (target + 1) % 77; }},
      {"a pack", [](int c, int64_t) { return c / 8 == 5; }},
      {"every second class", [](int c, int64_t) { return c % 2 == 0; }}};
  for (const Type type : {kHalf, kBFloat16, kFloat}) {
    for (const auto& [name, is_far] : patterns) {
      for (const double size : sizes_of(type)) {
        const bool is_target = name == patterns[0].first;
        if (!is_target && (type == kHalf || size == 60 || size == 0x1p16)) continue;
        for (const double far : {size, -size}) {
          CAPTURE(name, far);
          check_everywhere(type, [&](int64_t row, int c, int64_t target) {
            return is_far(c, target) ? far : moderate(row, c);
          });
        }
      }
    }
  }
}

TEST_CASE("rows that are read again are right in every schedule") {
  simt::for_each_schedule([] {
    for (const Type type : {kBFloat16, kFloat}) {
      check_everywhere(type, [](int64_t row, int c, int64_t target) {
        return c == target ? 300 : moderate(row, c);
      });
    }
  });
}

TEST_CASE("masked classes have no part in losses and gradients", "[asan]") {
  for (const Type type : {kHalf, kBFloat16, kFloat}) {
    const double lowest = type == kHalf    ? -65504
                          : type == kFloat ? std::numeric_limits<float>::lowest()
                                           : double(std::numeric_limits<c10::BFloat16>::lowest());
    for (const double mask : {-HUGE_VAL, lowest, -1e4}) {
      // With −93, the references of masked threads and of the row are 2¹²⁸ apart.
      for (const double around : {0.0, -93.0, -1000.0, 1000.0}) {
        CAPTURE(mask, around);
        // All logits of some threads are masked, and all but one of others.
        check_everywhere(type, [&](int64_t row, int c, int64_t target) {
          return c % 26 == 0 || c == target ? around + 0.5 * ((row + c) % 9) : mask;
        });
      }
    }
  }
}

TEST_CASE("a target of -inf has an infinite loss, and the gradient of a softmax", "[asan]") {
  for (const Type type : {kHalf, kBFloat16, kFloat}) {
    for (const double around : {0.0, -300.0, 300.0}) {
      CAPTURE(type, around);
      Batch batch(type, 1, 531, 1);
      batch.set_logits([&](int64_t row, int c) {
        return c == batch.targets[0] ? -HUGE_VAL : around + moderate(row, c);
      });
      forward_alone(batch, Team::kWarp);
      CHECK(batch.losses[0] == HUGE_VAL);
      CHECK(Exact(batch, batch.dense_logits(), 0).gradient_misses(batch, 0, 0) == 0);
    }
  }
}

TEST_CASE("a row without a distribution is NaN and does not change others", "[asan]") {
  for (const Type type : {kHalf, kBFloat16, kFloat}) {
    check_no_distribution(type, Team::kWarp, 777);
    check_no_distribution(type, Team::kWarp, 777, {.work = RowWork::kGeneral});
    check_no_distribution(type, Team::kWide, 777, {.work = RowWork::kPlain});
    if (type == kFloat) check_no_distribution(type, Team::kWarp, 777, {.quick_ulps = 64});
    if (type == kBFloat16) {
      check_no_distribution(type, Team::kHalfWarp, 777, {.work = RowWork::kHeldTwice});
    }
  }
}
