// The arithmetic of update_scale is that of the CPU, whose tests are in tests/python/amp: here are
// threads, flags, and every access to memory.
#include "simt/simt.h"

#include "cuda/update_scale.cuh"

#include <cmath>
#include <limits>
#include <vector>

#include "catch.h"

namespace math = ampfuse::math;

namespace {

// A loss scale with its counters and history, in allocations without spare room.
struct FakeScale {
  std::vector<float> scale;
  std::vector<int32_t> growth_tracker = {0};
  std::vector<int64_t> counters;
  std::vector<float> history = std::vector<float>(2 * math::kScaleRecord, -1);
  math::ScalePolicy policy = {2,    0.5, 3, -INFINITY, INFINITY, 1, math::HysteresisRefill::kGrowth,
                              true, 6};
  std::vector<double> norms;

  explicit FakeScale(float scale, int64_t hysteresis = 1)
      : scale{scale}, counters{hysteresis, 0, 0} {
    policy.hysteresis = hysteresis;
  }

  float update(const std::vector<float>& flags, const float* norm = nullptr) {
    ampfuse::ScaleFlags found_infs = {};
    for (const float& flag : flags) found_infs.flags[found_infs.count++] = &flag;
    const math::ScaleMemory memory = {scale.data(),
                                      growth_tracker.data(),
                                      counters.data(),
                                      history.empty() ? nullptr : history.data(),
                                      static_cast<int64_t>(history.size()) / math::kScaleRecord,
                                      norm,
                                      norms.empty() ? nullptr : norms.data()};
    simt::launch(ampfuse::update_scale_kernel, 1, ampfuse::kThreads, 0, found_infs, policy, memory);
    return scale[0];
  }
};

}  // namespace

TEST_CASE("the scale is updated once per launch, however many threads it has") {
  simt::for_each_schedule([] {
    FakeScale scale(1024, /*hysteresis=*/2);
    scale.history.clear();
    CHECK(scale.update({0}) == 1024);
    CHECK(scale.update({0}) == 1024);
    CHECK(scale.update({0}) == 2048);
    CHECK(scale.update({1}) == 2048);
    CHECK(scale.update({1}) == 1024);
    CHECK(scale.counters == std::vector<int64_t>{1, 2, 5});
    scale.policy.dynamic = false;
    CHECK(scale.update({1}) == 1024);
    CHECK(scale.counters == std::vector<int64_t>{1, 3, 6});
  });
}

TEST_CASE("any flag except 0 is an overflow, whether first or last in the list") {
  std::vector<float> flags(ampfuse::kScaleFlags, 0.0f);
  for (const float flag : {1.0f, 3.0f, -1.0f, std::nanf(""), INFINITY, 1e-44f}) {
    for (const size_t index : {size_t{0}, flags.size() - 1}) {
      flags[index] = flag;
      CHECK(FakeScale(8).update(flags) == 4);
      flags[index] = 0;
    }
  }
  CHECK(FakeScale(8).update(flags) == 8);
}

TEST_CASE("the history is a ring buffer of records") {
  FakeScale scale(8);
  const float norm = 2.5f;
  scale.update({0}, &norm);
  scale.update({1});
  CHECK(std::isnan(scale.history[5]));
  scale.update({0}, &norm);
  scale.history[5] = 0;
  CHECK(scale.history == std::vector<float>{4, 0, 2.5f, 8, 1, 0});
}

TEST_CASE("scale and growth tracker do not overflow") {
  FakeScale scale(3e38f);
  scale.policy.growth_interval = 1;
  CHECK(scale.update({0}) == 3e38f);
  scale.policy.growth_interval = int64_t{1} << 40;
  scale.growth_tracker[0] = std::numeric_limits<int32_t>::max();
  CHECK(scale.update({0}) == 3e38f);
  CHECK(scale.growth_tracker[0] == std::numeric_limits<int32_t>::max());
}

TEST_CASE("a norm far above the last ones is an outlier, which does not change the scale") {
  FakeScale scale(8);
  scale.norms = {0, 0, 0, math::kNoNormLimit};
  scale.history.resize(math::kScaleRecord);
  scale.policy.growth_interval = 1000;
  for (int i = 0; i < 100; ++i) {
    const float norm = i % 2 == 0 ? 2.0f : 3.0f;
    CHECK(scale.update({0}, &norm) == 8);
    CHECK(scale.history[1] == 0);
  }
  const float outlier = 10;
  CHECK(scale.update({0}, &outlier) == 8);
  CHECK(scale.history[1] == 2);
  CHECK(scale.update({1}, &outlier) == 4);
  CHECK(scale.history[1] == 1);
  CHECK(scale.norms[math::kNorms] == 102);
}
