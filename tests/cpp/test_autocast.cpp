#include <ATen/autocast_mode.h>
#include <ampfuse/ampfuse.h>
#include <torch/torch.h>

#include <stdexcept>
#include <thread>
#include <type_traits>

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

TEST_CASE("products are 16-bit within an autocast scope and float outside") {
  CHECK(dtype_of_product() == at::kFloat);
  {
    const AutocastGuard autocast(at::kCPU);
    CHECK(dtype_of_product() == at::kBFloat16);
    {
      const AutocastGuard half(at::kCPU, at::kHalf);
      CHECK(dtype_of_product() == at::kHalf);
      const AutocastGuard off(at::kCPU, std::nullopt, /*enabled=*/false);
      CHECK(dtype_of_product() == at::kFloat);
    }
    CHECK(dtype_of_product() == at::kBFloat16);
  }
  CHECK(dtype_of_product() == at::kFloat);
}

TEST_CASE("autocast settings and nesting are restored after an exception") {
  const AutocastState cpu = AutocastState::capture(at::kCPU);
  const AutocastState cuda = AutocastState::capture(at::kCUDA);
  try {
    const AutocastGuard outer(at::kCPU, at::kHalf, true, /*cache_enabled=*/false);
    const AutocastGuard inner(at::kCPU, at::kBFloat16);
    CHECK(!AutocastState::capture(at::kCPU).cache_enabled);  // inherited
    throw std::runtime_error("thrown");
  } catch (const std::runtime_error&) {
  }
  CHECK(same(AutocastState::capture(at::kCPU), cpu));
  CHECK(same(AutocastState::capture(at::kCUDA), cuda));
  CHECK(at::autocast::increment_nesting() == 1);
  CHECK(at::autocast::decrement_nesting() == 0);
}

TEST_CASE("each scope casts weights again, unlike a guard that keeps the cache") {
  // A guard as people write it by hand: it relies on the end of nesting to clear the cache.
  struct ByHand {
    ByHand() {
      at::autocast::set_autocast_enabled(at::kCPU, true);
      at::autocast::increment_nesting();
    }
    ~ByHand() {
      at::autocast::decrement_nesting();
      at::autocast::set_autocast_enabled(at::kCPU, false);
    }
  };
  struct Ours {
    AutocastGuard guard{at::kCPU};
  };
  const auto outputs_after_zeroing = [](auto guard_type) {
    using Guard = decltype(guard_type);
    torch::nn::Linear model(4, 4);
    const at::Tensor inputs = at::ones({1, 4});
    const auto forward = [&] {
      const typename Guard::type guard;
      return model->forward(inputs).detach().to(at::kFloat);
    };
    CHECK(!at::equal(forward(), at::zeros({1, 4})));
    {
      const torch::NoGradGuard no_grad;
      for (at::Tensor& parameter : model->parameters()) parameter.zero_();
    }
    return forward();
  };

  CHECK(!at::equal(outputs_after_zeroing(std::type_identity<ByHand>()), at::zeros({1, 4})));
  AutocastGuard::clear_cache();
  CHECK(at::equal(outputs_after_zeroing(std::type_identity<Ours>()), at::zeros({1, 4})));
}

TEST_CASE("clear_cache drops cached casts within a scope") {
  torch::nn::Linear model(4, 4);
  const at::Tensor inputs = at::ones({1, 4});
  const AutocastGuard autocast(at::kCPU);
  model->forward(inputs);
  {
    const torch::NoGradGuard no_grad;
    for (at::Tensor& parameter : model->parameters()) parameter.zero_();
  }
  CHECK(!at::equal(model->forward(inputs).to(at::kFloat), at::zeros({1, 4})));
  AutocastGuard::clear_cache();
  CHECK(at::equal(model->forward(inputs).to(at::kFloat), at::zeros({1, 4})));
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

TEST_CASE("an unsupported dtype leaves autocast off") {
  const AutocastGuard autocast(at::kCPU, at::kDouble);
  CHECK(!at::autocast::is_autocast_enabled(at::kCPU));
  CHECK(dtype_of_product() == at::kFloat);
}

TEST_CASE("a device type without autocast is refused") {
  CHECK_THROWS_AS(AutocastGuard(at::kMeta), c10::Error);
}
