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

// The dtype that a product of floats has on the CPU.
at::ScalarType dtype_of_product() {
  const at::Tensor x = at::ones({2, 2});
  return at::mm(x, x).scalar_type();
}

}  // namespace

TEST_CASE("products are 16-bit within the scope and float outside") {
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

TEST_CASE("everything is restored, also after an exception") {
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

TEST_CASE("weights are cast anew in each scope, where a guard that drops no cache has stale ones") {
  // What people write by hand: it sets and resets, and trusts that the cache ends with the nesting.
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

TEST_CASE("within one scope the cache is dropped when asked") {
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

TEST_CASE("a captured state is entered again on another thread, which does not have it") {
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

namespace {

using torch::autograd::AutogradContext;
using torch::autograd::variable_list;

// x → x·xᵀ, which notes the dtypes it computes in.
struct Square : torch::autograd::Function<Square> {
  static inline at::ScalarType forward_dtype, backward_dtype;

  static at::Tensor forward(AutogradContext* context, const at::Tensor& x,
                            std::optional<at::ScalarType> cast_inputs) {
    const ampfuse::CustomForward custom(*context, at::kCPU, cast_inputs);
    const at::Tensor input = custom.cast(x);
    context->save_for_backward({input});
    const at::Tensor product = at::mm(input, input.t());
    forward_dtype = product.scalar_type();
    return product;
  }

  static variable_list backward(AutogradContext* context, const variable_list& grads) {
    const ampfuse::CustomBackward custom(*context);
    const at::Tensor input = context->get_saved_variables()[0];
    const at::Tensor product = at::mm(grads[0].to(input.scalar_type()), input);
    backward_dtype = product.scalar_type();
    return {product.to(at::kFloat), at::Tensor()};
  }
};

}  // namespace

TEST_CASE("a custom function's backward has the autocast of its forward") {
  const at::Tensor x = at::ones({2, 2}).requires_grad_();
  at::Tensor loss;
  {
    const AutocastGuard autocast(at::kCPU, at::kHalf);
    loss = Square::apply(x, std::nullopt).sum();
    CHECK(Square::forward_dtype == at::kHalf);
  }
  loss.backward();
  CHECK(Square::backward_dtype == at::kHalf);

  loss = Square::apply(x, std::nullopt).sum();
  {
    const AutocastGuard autocast(at::kCPU, at::kHalf);
    loss.backward();
    CHECK(Square::backward_dtype == at::kFloat);
    CHECK(dtype_of_product() == at::kHalf);
  }
}

TEST_CASE("a custom function that casts its inputs computes without autocast") {
  const at::Tensor x = at::ones({2, 2}).requires_grad_();
  at::Tensor loss;
  {
    const AutocastGuard autocast(at::kCPU, at::kHalf);
    loss = Square::apply(x, at::kBFloat16).sum();
    CHECK(Square::forward_dtype == at::kBFloat16);
    loss.backward();
    CHECK(Square::backward_dtype == at::kBFloat16);
    Square::apply(x.to(at::kDouble), at::kBFloat16);
    CHECK(Square::forward_dtype == at::kDouble);
  }
  Square::apply(x, at::kBFloat16);  // torch's: without autocast nothing is cast
  CHECK(Square::forward_dtype == at::kFloat);
}

TEST_CASE("a backward without its forward is told so") {
  AutogradContext context;
  CHECK_THROWS_WITH(ampfuse::CustomBackward(context), ContainsSubstring("CustomForward"));
}

TEST_CASE("several devices may be set at once, and all be excluded") {
  // The state of a device is there without the device.
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

TEST_CASE("a dtype that is not cast to is warned about, and casts nothing") {
  const AutocastGuard autocast(at::kCPU, at::kDouble);
  CHECK(!at::autocast::is_autocast_enabled(at::kCPU));
  CHECK(dtype_of_product() == at::kFloat);
}

TEST_CASE("a device without autocast is refused") {
  CHECK_THROWS_AS(AutocastGuard(at::kMeta), c10::Error);
}
