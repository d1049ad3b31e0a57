// ampfuse::GradScaler as C++ programs use it. tests/python/amp/test_grad_scaler_*.py run the
// scalers of both languages and compare their results.
#include <ampfuse/ampfuse.h>

#include <cmath>
#include <functional>
#include <limits>
#include <sstream>

#include "optim_models.h"

using ampfuse::GradScaler;
using ampfuse::GradScalerOptions;

namespace {

// A model and one step of its training.
struct Training {
  explicit Training(torch::Device device = torch::kCPU) { model->to(device); }

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
    if (overflow) model->bias.mutable_grad()[1] = std::numeric_limits<float>::infinity();
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
    // Records without their state do not become records of other updates.
    scaler.load_history({{8, false, 1}});
    REQUIRE(scaler.history().size() == 1);
    CHECK(scaler.history()[0].scale == 8);
  }
}

TEST_CASE("a list of losses is scaled, and the scale is created on their device") {
  GradScaler scaler(GradScalerOptions().init_scale(4));
  const auto scaled = scaler.scale({torch::ones({}), torch::full({2}, 3.0)});
  REQUIRE(scaled.size() == 2);
  CHECK(scaled[0].item<float>() == 4);
  CHECK(scaled[1][1].item<float>() == 12);
  CHECK(scaler.scale_tensor().device() == torch::kCPU);
  CHECK_THROWS_WITH(scaler.scale(torch::Tensor()),
                    ContainsSubstring("GradScaler::scale: expected a tensor, got none"));
}

TEST_CASE("scale_tensor exists before the first scale, on the device of the options") {
  for (const auto device : devices()) {
    GradScaler scaler(GradScalerOptions().init_scale(4).device(device));
    const auto scale = scaler.scale_tensor();
    CHECK(scale.device().type() == device.type());
    CHECK(scale.item<float>() == 4);
    std::ignore = scaler.scale(torch::ones({}, device));
    scaler.update(16.0);
    CHECK(scale.item<float>() == 16);  // updated in place
    scaler.update(torch::full({1}, 2.0, device));
    CHECK(scale.item<float>() == 2);
    CHECK_THROWS_WITH(scaler.update(torch::ones({2})), ContainsSubstring("1-element"));
  }
}

TEST_CASE("a moved or loaded GradScaler keeps scale, policy and counters") {
  Training training;
  ampfuse::AdamW optimizer(training.model->parameters());
  GradScaler first(GradScalerOptions().init_scale(64).hysteresis(2).min_scale(1));
  training.step(first, optimizer, /*overflow=*/true);
  GradScaler moved = std::move(first);
  std::stringstream archive;
  torch::save(moved, archive);
  GradScaler loaded;
  torch::load(loaded, archive);

  CHECK(loaded.options().hysteresis() == 2);
  CHECK(loaded.options().min_scale() == 1.0);
  for (GradScaler* const scaler : {&moved, &loaded}) {
    CHECK(scaler->get_scale() == 64);
    training.step(*scaler, optimizer, /*overflow=*/true);  // the second one lowers the scale
    CHECK(scaler->get_scale() == 32);
  }
}

TEST_CASE("changed options take effect and are checked when the scale is updated") {
  Training training;
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
  Training training;
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
  auto& options = options_of(optimizer);
  options.eps(-1);

  CHECK_THROWS_WITH(scaler.step(optimizer), ContainsSubstring("Invalid epsilon value"));
  CHECK(!optimizer.grad_scale);
  CHECK(!optimizer.found_inf);
  options.eps(1e-8);
  scaler.step(optimizer);
  CHECK(param[0].item<float>() < 1);
}

TEST_CASE("a scaler's step clips a group with a limit of its own by the norm of that group") {
  // Gradients are ones, with norms 2 and 4.
  const Tensors params = {torch::zeros({4}).requires_grad_(), torch::zeros({16}).requires_grad_()};
  const auto options = ampfuse::AdamWOptions().write_back_grads(true);
  ampfuse::AdamW optimizer({group_of(params[0], ampfuse::AdamWOptions(options).max_grad_norm(1)),
                            group_of(params[1], options)},
                           ampfuse::AdamWOptions().max_grad_norm(3));
  GradScaler scaler(GradScalerOptions().init_scale(8));
  scaler.scale(params[0].sum() + params[1].sum()).backward();
  scaler.step(optimizer);

  CHECK(params[0].grad()[0].item<float>() == Approx(1 / 2.0));
  CHECK(params[1].grad()[0].item<float>() == Approx(3 / 4.0));
  CHECK(optimizer.grad_norm().item<float>() == Approx(4));
}

TEST_CASE("every method of a moved-from scaler throws, until another one is assigned to it") {
  const auto param = torch::ones({2}).requires_grad_();
  ampfuse::AdamW optimizer(Tensors{param});
  GradScaler scaler;
  const GradScaler moved = std::move(scaler);
  std::stringstream stream;
  const std::vector<std::function<void()>> calls = {
      [&] { std::ignore = scaler.scale(param); },
      [&] { scaler.unscale_(optimizer); },
      [&] { scaler.clip_grad_norm_(optimizer, 1); },
      [&] { scaler.step(optimizer); },
      [&] { scaler.update(); },
      [&] { scaler.update(2.0); },
      [&] { scaler.update(torch::ones({})); },
      [&] { scaler.get_scale(); },
      [&] { scaler.scale_tensor(); },
      [&] { scaler.is_enabled(); },
      [&] { scaler.options(); },
      [&] { std::as_const(scaler).options(); },
      [&] { scaler.step_skipped(); },
      [&] { scaler.was_skipped(); },
      [&] { std::ignore = scaler.gate(std::make_shared<torch::optim::StepLR>(optimizer, 1)); },
      [&] { std::ignore = scaler.history(); },
      [&] { scaler.load_history({}); },
      [&] {
        using Named = torch::OrderedDict<std::string, torch::Tensor>;
        std::ignore = scaler.overflow_report(Named());
      },
      [&] { std::ignore = scaler.state_dict(); },
      [&] { scaler.load_state_dict(moved.state_dict()); },
      [&] { torch::save(scaler, stream); },
      [&] { stream << scaler; },
      [&] { ampfuse::CrossEntropyLoss(ampfuse::CrossEntropyOptions(), &scaler); }};
  for (const auto& call : calls) CHECK_THROWS_WITH(call(), ContainsSubstring("was moved from"));

  scaler = GradScaler(GradScalerOptions().init_scale(4));
  CHECK(scaler.get_scale() == 4);
}

TEST_CASE("an optimizer that moves between unscale_ and step is not unscaled twice") {
  const auto param = torch::zeros({1}).requires_grad_();
  const auto step = [&](auto& optimizer) {
    GradScaler scaler(GradScalerOptions().init_scale(64));
    param.mutable_grad() = torch::Tensor();
    scaler.scale(2 * param.sum()).backward();
    scaler.unscale_(optimizer);
    auto moved = std::move(optimizer);
    scaler.step(moved);
    CHECK(param.grad().item<float>() == 2);
    CHECK_THROWS_WITH(scaler.step(moved), ContainsSubstring("step() has already been called"));
    optimizer = std::move(moved);
    CHECK_THROWS_WITH(scaler.unscale_(optimizer), ContainsSubstring("called after step()"));
  };
  ampfuse::AdamW ours(Tensors{param}, ampfuse::AdamWOptions().max_grad_norm(9));
  step(ours);
  CHECK(ours.grad_norm().item<float>() == 2);
  torch::optim::SGD theirs(Tensors{param}, torch::optim::SGDOptions(0.5));
  const float before = param.item<float>();
  step(theirs);
  CHECK(param.item<float>() == before - 1);
}

TEST_CASE("scalers and optimizers refuse each other's archives") {
  ampfuse::AdamW optimizer(Tensors{torch::zeros({1})});
  GradScaler scaler;
  std::stringstream of_optimizer, of_scaler;
  torch::save(optimizer, of_optimizer);
  torch::save(scaler, of_scaler);
  CHECK_THROWS_WITH(torch::load(scaler, of_optimizer),
                    ContainsSubstring("expected the archive of a scaler, got one with"));
  CHECK_THROWS_WITH(torch::load(optimizer, of_scaler),
                    ContainsSubstring("expected the archive of an optimizer, which has a state"));
}

TEST_CASE("a gate steps a scheduler only after steps that were taken") {
  for (const auto device : devices()) {
    Training training(device);
    ampfuse::AdamW optimizer(training.model->parameters(), ampfuse::AdamWOptions(1));
    GradScaler scaler(GradScalerOptions().device(device));
    ampfuse::Gate gate = scaler.gate(std::make_shared<torch::optim::StepLR>(optimizer, 1, 0.5));
    for (const bool overflow : {false, true, false, true, true, false}) {
      training.step(scaler, optimizer, overflow);
      gate.step();
    }
    gate.wait();
    CHECK(options_of(optimizer).lr() == 0.25);  // torch's first call does not change the rate

    GradScaler moved = std::move(scaler);
    training.step(moved, optimizer);
    gate.step();
    gate.wait();
    CHECK(options_of(optimizer).lr() == 0.125);
    moved = GradScaler(GradScalerOptions().enabled(false));
    CHECK_THROWS_WITH(gate.step(), ContainsSubstring("gate: its GradScaler was destroyed"));
    gate = moved.gate(std::make_shared<torch::optim::StepLR>(optimizer, 1, 0.5));
    gate.step();
    gate.step();
    CHECK(options_of(optimizer).lr() == 0.0625);
    CHECK_THROWS_WITH(moved.gate(nullptr), ContainsSubstring("expected a scheduler, got null"));
  }
}

TEST_CASE("options of a scaler are compared and printed, and a device may be named") {
  const auto options = GradScalerOptions().device("cpu").history(3).min_scale(0.5);
  CHECK(options == GradScalerOptions(options));
  CHECK(!(options == GradScalerOptions(options).device("meta")));
  CHECK(!(options == GradScalerOptions(options).allow_no_grads(true)));
  CHECK(GradScalerOptions().device("cuda:1").device() == torch::Device(torch::kCUDA, 1));
  std::ostringstream text;
  text << options << "\n" << GradScaler(GradScalerOptions(options).enabled(false));
  const std::string first = "(init_scale=65536, growth_factor=2, backoff_factor=0.5, ";
  CHECK_THAT(text.str(), ContainsSubstring("ampfuse::GradScalerOptions" + first));
  CHECK_THAT(text.str(), ContainsSubstring("ampfuse::GradScaler" + first));
  CHECK_THAT(text.str(), ContainsSubstring("enabled=false, device=cpu, min_scale=0.5, hysteresis"));
}
