// 16-bit parameters of ampfuse::AdamW and their masters, which take over what other code writes to
// the parameters.

#include <ampfuse/optim.h>

#include "optim_models.h"

namespace {

using ampfuse::AdamWOptions;
using ampfuse::MasterWeights;

// Returns an optimizer that has taken one step and has learning rate 0 from then on.
ampfuse::AdamW still(const Tensors& params, MasterWeights masters = MasterWeights::kAuto) {
  ampfuse::AdamW optimizer(params, AdamWOptions(0.01).weight_decay(0).master_weights(masters));
  train(optimizer, params, 1, 1);
  optimizer.param_groups()[0].options().set_lr(0);
  return optimizer;
}

torch::Tensor narrow_param(torch::Device device, torch::Dtype dtype) {
  torch::manual_seed(0);
  return torch::randn({300}).to(device, dtype).requires_grad_();
}

}  // namespace

TEST_CASE("AdamW trains a tiny bfloat16 model") {
  for (const auto device : devices()) {
    torch::manual_seed(3);
    torch::nn::Linear model(4, 1);
    model->to(device, torch::kBFloat16);
    const auto input = torch::randn({32, 4}).to(device, torch::kBFloat16);
    const auto target = input.sum(1, /*keepdim=*/true);
    const auto loss = [&] { return (model->forward(input) - target).square().mean(); };
    const float before = loss().item<float>();
    ampfuse::AdamW optimizer(model->parameters(),
                             AdamWOptions(1e-1).weight_decay(0.01).max_grad_norm(1.0));
    for (int step = 0; step < 50; ++step) {
      const auto returned = optimizer.step([&] {
        optimizer.zero_grad();
        const auto of_step = loss();
        of_step.backward();
        return of_step;
      });
      REQUIRE(returned.defined());
    }

    CHECK(loss().item<float>() < before / 10);
  }
}

TEST_CASE("a 16-bit model with masters equals the float model, rounded") {
  const auto [dtype, masters] = GENERATE(std::tuple(torch::kHalf, MasterWeights::kAuto),
                                         std::tuple(torch::kBFloat16, MasterWeights::kAuto),
                                         std::tuple(torch::kBFloat16, MasterWeights::kRemainder));
  for (const auto device : devices()) {
    const auto narrow = parameters(device, dtype);
    const auto wide = copies(narrow, torch::kFloat);
    const auto options = AdamWOptions(1e-3).betas({0.8, 0.99});
    ampfuse::AdamW optimizer(narrow, AdamWOptions(options).master_weights(masters));
    ampfuse::AdamW reference(wide, options);
    train(optimizer, narrow, 1, 20);
    train(reference, wide, 1, 20);

    check_same_bits(optimizer.master_params(), wide);
    if (masters == MasterWeights::kAuto) check_same_bits(narrow, copies(wide, dtype));
    CHECK(state_of(optimizer, narrow[0]).exp_avg().scalar_type() == torch::kFloat);
  }
}

TEST_CASE("small updates of bfloat16 parameters are lost without masters") {
  const Tensors params = {torch::ones({8}, torch::dtype(torch::kBFloat16).requires_grad(true))};
  ampfuse::Adam optimizer(params, ampfuse::AdamOptions(1e-4).master_weights(MasterWeights::kOff));
  train(optimizer, params, 1, 20);

  CHECK(torch::equal(params[0], torch::ones_like(params[0])));
  CHECK_FALSE(state_of(optimizer, params[0]).master_param().defined());
  CHECK(optimizer.master_params()[0].is_same(params[0]));
}

TEST_CASE("values written into a parameter survive a step and reach its master") {
  const auto dtype = GENERATE(torch::kHalf, torch::kBFloat16);
  const int write = GENERATE(0, 1, 2);
  for (const auto device : devices()) {
    const auto param = narrow_param(device, dtype);
    ampfuse::AdamW optimizer = still({param});
    for (const double number : {3.0, 5.0}) {
      const auto value = torch::full_like(param, number).detach();
      if (write == 0) {
        const torch::NoGradGuard no_grad;
        param.copy_(value);
      } else if (write == 1) {
        param.data().copy_(value);
      } else {
        torch::Tensor(param).set_data(value.clone());
      }
      train(optimizer, {param}, 2, 2);

      CHECK(same_bits(param, value));
      CHECK(same_bits(optimizer.master_params()[0], value.to(torch::kFloat)));
    }
  }
}

TEST_CASE("elements that were not written keep the bits of their masters") {
  const bool syncs = GENERATE(false, true);
  for (const auto device : devices()) {
    const auto param = narrow_param(device, torch::kBFloat16);
    ampfuse::AdamW optimizer = still({param});
    const auto before = optimizer.master_params()[0].clone();
    fill(param.slice(0, 100, 110), 0);
    if (syncs) optimizer.sync_masters_from_model();
    train(optimizer, {param}, 2, 2);

    before.slice(0, 100, 110).zero_();
    CHECK(same_bits(optimizer.master_params()[0], before));
  }
}

TEST_CASE("setting a parameter with a remainder to 0 or infinity gives no NaN") {
  const double number = GENERATE(0.0, -0.0, INFINITY, -INFINITY);
  for (const auto device : devices()) {
    const auto param = narrow_param(device, torch::kBFloat16);
    ampfuse::AdamW optimizer = still({param}, MasterWeights::kRemainder);
    optimizer.param_groups()[0].options().set_lr(0.01);
    CHECK((state_of(optimizer, param).master_param() < 0).any().item<bool>());
    param.data().fill_(number);

    CHECK_FALSE(optimizer.master_params()[0].isnan().any().item<bool>());
    train(optimizer, {param}, 2, 2);
    CHECK_FALSE(param.isnan().any().item<bool>());
  }
}

TEST_CASE("loading a model without syncing masters warns once") {
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  const auto params = parameters(torch::kCPU, torch::kBFloat16);
  ampfuse::AdamW optimizer(params, AdamWOptions(0));
  train(optimizer, params, 1, 2);
  CHECK(warnings.messages.empty());

  fill(params[0], 2);
  optimizer.sync_masters_from_model();
  train(optimizer, params, 3, 3);
  CHECK(warnings.messages.empty());
  CHECK(torch::equal(params[0], torch::full_like(params[0], 2)));

  for (int step = 4; step <= 5; ++step) {
    fill(params[0], step);
    train(optimizer, params, step, step);
    CHECK(torch::equal(params[0], torch::full_like(params[0], step)));
  }
  REQUIRE(warnings.messages.size() == 1);
  CHECK_THAT(warnings.messages[0], ContainsSubstring("call sync_masters_from_model()"));
}

TEST_CASE("a step refuses moments of another dtype or shape, and says what to do") {
  auto param = torch::ones({3, 4}).requires_grad_();
  ampfuse::AdamW optimizer(Tensors{param});
  const auto step = [&] {
    param.mutable_grad() = torch::ones_like(param);
    optimizer.step();
  };
  step();
  const c10::NoGradGuard no_grad;
  param.set_data(param.detach().to(torch::kDouble));
  CHECK_THROWS_WITH(step(), ContainsSubstring("a parameter of shape [3, 4] is float64 now, but its "
                                              "exp_avg is float32. If the model was cast after a "
                                              "step, cast it back, or make a new optimizer"));
  param.mutable_grad() = torch::Tensor();
  param.set_data(torch::ones({5, 4}));
  CHECK_THROWS_WITH(step(), ContainsSubstring("a parameter has shape [5, 4] now, but its exp_avg "
                                              "has [3, 4]. If the parameter was replaced"));
  param.mutable_grad() = torch::Tensor();
  param.set_data(torch::ones({3, 4}));
  step();
}
