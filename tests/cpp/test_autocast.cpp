// Parts of AutocastGuard that only C++ programs have. tests/python/amp/test_autocast_guard.py tests
// the rest, also through C++.
#include <ATen/autocast_mode.h>
#include <ampfuse/ampfuse.h>

#include <thread>

#include "torch_catch.h"

using ampfuse::AutocastGuard;
using ampfuse::AutocastState;

namespace {

bool same(const AutocastState& a, const AutocastState& b) {
  return a.device_type == b.device_type && a.enabled == b.enabled && a.dtype == b.dtype &&
         a.cache_enabled == b.cache_enabled;
}

// Returns the dtype of a product of two float matrices on the CPU.
at::ScalarType dtype_of_product() {
  const at::Tensor x = at::ones({2, 2});
  return at::mm(x, x).scalar_type();
}

}  // namespace

TEST_CASE("autocast settings and nesting are restored after an exception") {
  const AutocastState cpu = AutocastState::capture(at::kCPU);
  const AutocastState cuda = AutocastState::capture(at::kCUDA);
  try {
    const AutocastGuard outer(at::kCPU, at::kHalf, true, /*cache_enabled=*/false);
    CHECK(dtype_of_product() == at::kHalf);
    const AutocastGuard inner(torch::Device("cpu"), at::kBFloat16);
    CHECK(dtype_of_product() == at::kBFloat16);
    CHECK(!AutocastState::capture(at::kCPU).cache_enabled);  // inherited
    const AutocastGuard off(at::kCPU, std::nullopt, /*enabled=*/false);
    CHECK(dtype_of_product() == at::kFloat);
    throw std::runtime_error("thrown");
  } catch (const std::runtime_error&) {
  }
  CHECK(same(AutocastState::capture(at::kCPU), cpu));
  CHECK(same(AutocastState::capture(at::kCUDA), cuda));
  CHECK(at::autocast::increment_nesting() == 1);
  CHECK(at::autocast::decrement_nesting() == 0);
}

TEST_CASE("a captured autocast state can be entered on another thread") {
  const AutocastGuard autocast(at::kCPU, at::kHalf);
  const AutocastState state = AutocastState::capture(at::kCPU);
  at::ScalarType without = at::kDouble;
  at::ScalarType with = at::kDouble;
  std::thread([&] {
    without = dtype_of_product();
    const AutocastGuard again(state);
    with = dtype_of_product();
  }).join();
  CHECK(without == at::kFloat);
  CHECK(with == at::kHalf);
}

TEST_CASE("two devices may autocast at once, and NoAutocastGuard turns it off") {
  // torch keeps autocast state for XPU even if the machine has no such device.
  const AutocastState before = AutocastState::capture(at::kXPU);
  {
    const AutocastGuard cpu(at::kCPU);
    const AutocastGuard xpu(at::kXPU, at::kBFloat16);
    CHECK(at::autocast::is_autocast_enabled(at::kCPU));
    CHECK(at::autocast::is_autocast_enabled(at::kXPU));
    {
      const ampfuse::NoAutocastGuard none;
      CHECK(dtype_of_product() == at::kFloat);
    }
    CHECK(dtype_of_product() == at::kBFloat16);
  }
  CHECK(same(AutocastState::capture(at::kXPU), before));
}

TEST_CASE("a device type without autocast is refused") {
  CHECK_THROWS_AS(AutocastGuard(at::kMeta), c10::Error);
}
