// ampfuse::GradScaler as C++ programs use it. tests/python/amp/test_grad_scaler_*.py run the
// scalers of both languages and compare their results.
#include <ATen/record_function.h>
#include <ampfuse/ampfuse.h>

#include <cmath>
#include <filesystem>
#include <functional>
#include <limits>
#include <memory>
#include <string>
#include <utility>

#include "optim_models.h"

using ampfuse::GradScaler;
using ampfuse::GradScalerOptions;

namespace {

constexpr float kInfinity = std::numeric_limits<float>::infinity();

// Counts the calls of an operator while `body` runs.
int times_called(const std::string& op, const std::function<void()>& body) {
  static int calls;
  static std::string counted;
  calls = 0;
  counted = op;
  const auto handle = at::addThreadLocalCallback(at::RecordFunctionCallback(
      [](const at::RecordFunction& function) -> std::unique_ptr<at::ObserverContext> {
        calls += function.name() == counted;
        return nullptr;
      }));
  body();
  at::removeCallback(handle);
  return calls;
}

// A model and one step of its training.
struct Training {
  explicit Training(torch::Device device) { model->to(device); }

  template <typename Optimizer>
  void step(GradScaler& scaler, Optimizer& optimizer, bool overflow = false) {
    optimizer.zero_grad();
    const auto inputs = torch::ones({2, 4}, model->weight.device());
    torch::Tensor loss;
    {
      const ampfuse::AutocastGuard autocast(inputs.device().type(), torch::kBFloat16);
      loss = model->forward(inputs).to(torch::kFloat).square().mean();
    }
    scaler.scale(loss).backward();
    if (overflow) model->bias.mutable_grad()[1] = kInfinity;
    scaler.step(optimizer);
    scaler.update();
  }

  torch::nn::Linear model{4, 3};
};

}  // namespace

TEST_CASE("a training loop steps, skips, backs off and reports what happened") {
  for (const auto device : devices()) {
    Training training(device);
    ampfuse::AdamW optimizer(training.model->parameters(), ampfuse::AdamWOptions(0.1));
    GradScaler scaler(GradScalerOptions().init_scale(64).growth_interval(2).history(8));
    const auto before = training.model->weight.detach().clone();

    training.step(scaler, optimizer, /*overflow=*/true);
    CHECK(torch::equal(training.model->weight, before));
    CHECK(scaler.was_skipped());
    CHECK(scaler.step_skipped().item<bool>());
    CHECK(scaler.get_scale() == 32);
    CHECK(scaler.overflow_report(*training.model) == std::vector<std::string>{"bias"});

    training.step(scaler, optimizer);
    training.step(scaler, optimizer);
    CHECK(!torch::equal(training.model->weight, before));
    CHECK(!scaler.was_skipped());
    CHECK(scaler.get_scale() == 64);

    const auto history = scaler.history();
    REQUIRE(history.size() == 3);
    CHECK(history[0].skipped);
    CHECK(history[1].scale == 32);
    CHECK(std::isfinite(history[2].norm));
  }
}

TEST_CASE("a scaler unscales gradients before a step of torch's SGD") {
  for (const auto device : devices()) {
    const auto scaled = parameters(device);
    const auto plain = copies(scaled);
    torch::optim::SGD sgd(scaled, torch::optim::SGDOptions(0.5));
    torch::optim::SGD reference(plain, torch::optim::SGDOptions(0.5));
    GradScaler scaler(GradScalerOptions().init_scale(8));
    scaler.scale(torch::ones({}, device));
    feed(scaled, 1, /*scale=*/8);
    feed(plain, 1);

    scaler.step(sgd);
    reference.step();

    check_same_bits(scaled, plain);
  }
}

TEST_CASE("GradScaler::clip_grad_norm_ computes the norm while it unscales") {
  for (const auto device : devices()) {
    const auto params = parameters(device);
    const auto others = copies(params);
    torch::optim::SGD optimizer(params, torch::optim::SGDOptions(0.5));
    torch::optim::SGD other_optimizer(others, torch::optim::SGDOptions(0.5));
    GradScaler scaler(GradScalerOptions().init_scale(8));
    scaler.scale(torch::ones({}, device));
    feed(params, 1, /*scale=*/8);
    feed(others, 1, /*scale=*/8);

    torch::Tensor norm;
    const auto norms_taken = times_called("ampfuse::multi_tensor_norm",
                                          [&] { norm = scaler.clip_grad_norm_(optimizer, 0.5); });
    scaler.unscale_(other_optimizer);
    const torch::Tensor expected = ampfuse::clip_grad_norm_(others, 0.5);

    CHECK(norms_taken == 0);
    CHECK(same_bits(norm, expected));
    for (size_t i = 0; i < params.size(); ++i) {
      CHECK(same_bits(params[i].grad(), others[i].grad()));
    }
  }
}

TEST_CASE("the norm is computed anew if gradients changed after unscale_") {
  for (const auto device : devices()) {
    const auto params = parameters(device);
    torch::optim::SGD optimizer(params, torch::optim::SGDOptions(0.5));
    GradScaler scaler(GradScalerOptions().init_scale(8));
    scaler.scale(torch::ones({}, device));
    feed(params, 1, /*scale=*/8);
    scaler.unscale_(optimizer);
    for (const auto& param : params) param.grad().data().mul_(2);
    const auto expected = ampfuse::get_total_norm(
        {params[0].grad(), params[1].grad(), params[2].grad(), params[3].grad()});

    CHECK(same_bits(scaler.clip_grad_norm_(optimizer, 1e9), expected));
    CHECK(same_bits(ampfuse::clip_grad_norm_(params, 1e9), expected));
  }
}

TEST_CASE("a scale without a finite inverse is an overflow for ampfuse's AdamW too") {
  const double scale = GENERATE(0x1p-149, 0x1p-128);
  for (const auto device : devices()) {
    const auto params = parameters(device);
    const auto before = copies(params);
    ampfuse::AdamW optimizer(params);
    GradScaler scaler(GradScalerOptions().init_scale(scale));
    scaler.scale(torch::ones({}, device));
    feed(params, 1, scale);
    scaler.step(optimizer);
    scaler.update();

    CHECK(scaler.was_skipped());
    CHECK(scaler.get_scale() == static_cast<float>(scale) / 2);
    check_same_bits(params, before);
  }
}

TEST_CASE("a list of losses is scaled, and the scale is created on their device") {
  GradScaler scaler(GradScalerOptions().init_scale(4));
  const auto scaled = scaler.scale({torch::ones({}), torch::full({2}, 3.0)});
  REQUIRE(scaled.size() == 2);
  CHECK(scaled[0].item<float>() == 4);
  CHECK(scaled[1][1].item<float>() == 12);
  CHECK(scaler.scale_tensor().device() == torch::kCPU);
}

TEST_CASE("scale_tensor exists before the first scale, on the device of the options") {
  for (const auto device : devices()) {
    GradScaler scaler(GradScalerOptions().init_scale(4).device(device));
    const auto scale = scaler.scale_tensor();
    CHECK(scale.device().type() == device.type());
    CHECK(scale.item<float>() == 4);
    scaler.scale(torch::ones({}, device));
    scaler.update(16.0);
    CHECK(scale.item<float>() == 16);  // updated in place
    scaler.update(torch::full({1}, 2.0, device));
    CHECK(scale.item<float>() == 2);
    CHECK_THROWS_WITH(scaler.update(torch::ones({2})), ContainsSubstring("1-element"));
  }
}

TEST_CASE("a moved GradScaler keeps its scale") {
  Training training(torch::kCPU);
  ampfuse::AdamW optimizer(training.model->parameters());
  GradScaler first(GradScalerOptions().init_scale(64));
  training.step(first, optimizer, /*overflow=*/true);
  GradScaler second = std::move(first);
  CHECK(second.get_scale() == 32);
  training.step(second, optimizer, /*overflow=*/true);
  CHECK(second.get_scale() == 16);
}

TEST_CASE("torch::save and torch::load keep scale, policy and counters") {
  const auto file = std::filesystem::temp_directory_path() / "ampfuse_test_grad_scaler.pt";
  Training training(torch::kCPU);
  ampfuse::AdamW optimizer(training.model->parameters());
  GradScaler saved(GradScalerOptions().init_scale(64).hysteresis(2).min_scale(1).dynamic(true));
  training.step(saved, optimizer, /*overflow=*/true);
  torch::save(saved, file.string());

  GradScaler loaded;
  torch::load(loaded, file.string());
  std::filesystem::remove(file);

  CHECK(loaded.options().hysteresis() == 2);
  CHECK(loaded.options().min_scale() == 1.0);
  CHECK(loaded.get_scale() == 64);
  training.step(loaded, optimizer,
                /*overflow=*/true);  // hysteresis: the second one lowers the scale
  CHECK(loaded.get_scale() == 32);
}

TEST_CASE("changed options take effect and are checked when the scale is updated") {
  Training training(torch::kCPU);
  ampfuse::AdamW optimizer(training.model->parameters());
  GradScaler scaler(GradScalerOptions().init_scale(64));
  scaler.options().growth_interval(1);
  training.step(scaler, optimizer);
  CHECK(scaler.get_scale() == 128);
  scaler.options().growth_interval(0);
  CHECK_THROWS_WITH(training.step(scaler, optimizer),
                    ContainsSubstring("growth_interval: expected"));
  CHECK(scaler.get_scale() == 128);
}

TEST_CASE("too many consecutive skips throw ScaleCollapseError") {
  Training training(torch::kCPU);
  ampfuse::AdamW optimizer(training.model->parameters());
  GradScaler scaler(GradScalerOptions().max_consecutive_skips(2));
  training.step(scaler, optimizer, /*overflow=*/true);
  CHECK_THROWS_AS(training.step(scaler, optimizer, /*overflow=*/true), ampfuse::ScaleCollapseError);
}

TEST_CASE("a step with a closure is refused unless the scaler is disabled") {
  const auto param = torch::ones({2}).requires_grad_();
  const auto closure = [&] {
    param.mutable_grad() = torch::ones({2});
    return torch::full({}, 7.0);
  };
  torch::optim::LBFGS optimizer({param});

  GradScaler enabled;
  enabled.scale(param.sum()).backward();
  CHECK_THROWS_WITH(enabled.step(optimizer, closure), ContainsSubstring("Closure use is not"));
  CHECK_THROWS_WITH(enabled.step(optimizer), ContainsSubstring("LBFGS"));

  GradScaler disabled(GradScalerOptions().enabled(false));
  CHECK(disabled.step(optimizer, closure).item<float>() == 7);
  CHECK(param[0].item<float>() < 1);
}

TEST_CASE("after a step throws, the optimizer has no scale and can step again") {
  const auto param = torch::ones({2}).requires_grad_();
  ampfuse::AdamW optimizer(Tensors{param});
  GradScaler scaler;
  scaler.scale(param.sum()).backward();
  auto& options = static_cast<ampfuse::AdamWOptions&>(optimizer.param_groups()[0].options());
  options.eps(-1);

  CHECK_THROWS_WITH(scaler.step(optimizer), ContainsSubstring("Invalid epsilon value"));
  CHECK(!optimizer.grad_scale);
  CHECK(!optimizer.found_inf);
  options.eps(1e-8);
  scaler.step(optimizer);
  CHECK(param[0].item<float>() < 1);
}

TEST_CASE("records without their state do not become records of other updates") {
  ampfuse::GradScaler scaler(ampfuse::GradScalerOptions().history(4));
  const auto param = torch::ones({2}).requires_grad_(true);
  torch::optim::SGD optimizer({param}, 0.1);
  for (int step = 0; step < 3; ++step) {
    param.mutable_grad() = torch::ones({2});
    scaler.scale(torch::ones({}));
    scaler.step(optimizer);
    scaler.update();
  }
  scaler.load_history({{8, false, 1}});
  REQUIRE(scaler.history().size() == 1);
  CHECK(scaler.history()[0].scale == 8);
}
