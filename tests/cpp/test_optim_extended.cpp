// Moments in 8 bits, weights that are rounded at random, and averages of the weights.

#include <ampfuse/ampfuse.h>

#include "checkpoint_folder.h"
#include "sgd_models.h"

using ampfuse::AdamW;
using ampfuse::AdamWOptions;

namespace {

AdamWOptions extended(int64_t seed = 0) {
  return AdamWOptions(1e-2)
      .master_weights(MasterWeights::kStochastic)
      .state_dtype(torch::kChar)
      .ema(0.9)
      .seed(seed);
}

template <typename Optimizer>
void copy_archive(const Optimizer& from, Optimizer& to) {
  std::stringstream stream;
  torch::save(from, stream);
  torch::load(to, stream);
}

}  // namespace

TEST_CASE("moments in 8 bits take two bytes and a sixteenth") {
  const auto params = parameters(torch::kCPU, torch::kBFloat16);
  AdamW optimizer(params, extended());
  train(optimizer, params, 1, 3);
  const auto& state = state_of(optimizer, params[0]);
  CHECK(state.exp_avg().scalar_type() == torch::kChar);
  CHECK(state.exp_avg_sq().scalar_type() == torch::kByte);
  CHECK(state.exp_avg_units().scalar_type() == torch::kBFloat16);
  CHECK(state.exp_avg_units().numel() == (params[0].numel() + 31) / 32);
  CHECK_FALSE(state.master_param().defined());
}

TEST_CASE("steps with moments in 8 bits stay near those with float moments") {
  const auto params = parameters(torch::kCPU);
  const auto exact = copies(params);
  AdamW coded(params, AdamWOptions(1e-3).state_dtype(torch::kChar));
  AdamW plain(exact, AdamWOptions(1e-3));
  train(coded, params, 1, 20);
  train(plain, exact, 1, 20);
  for (size_t i = 0; i < params.size(); ++i) {
    CHECK((params[i] - exact[i]).abs().sum().item<double>() <=
          0.02 * 1e-3 * 20 * params[i].numel());
  }
}

TEST_CASE("two runs have the same bits, and another seed has others") {
  const auto run = [](int64_t seed) {
    const auto params = parameters(torch::kCPU, torch::kBFloat16);
    AdamW optimizer(params, extended(seed));
    train(optimizer, params, 1, 4);
    return params;
  };
  const auto first = run(3);
  check_same_bits(first, run(3));
  CHECK_FALSE(first[0].equal(run(4)[0]));
}

TEST_CASE("an archive restores codes, units and averages bit for bit") {
  const auto params = parameters(torch::kCPU, torch::kBFloat16);
  AdamW optimizer(params, extended());
  train(optimizer, params, 1, 3);
  const auto others = copies(params, torch::kBFloat16);
  AdamW loaded(others, extended());
  copy_archive(optimizer, loaded);
  for (size_t i = 0; i < params.size(); ++i) {
    const auto& a = state_of(optimizer, params[i]);
    const auto& b = state_of(loaded, others[i]);
    CHECK(a.exp_avg().equal(b.exp_avg()));
    CHECK(a.exp_avg_sq_units().equal(b.exp_avg_sq_units()));
    CHECK(a.ema_param().equal(b.ema_param()));
  }
  train(optimizer, params, 4, 6);
  train(loaded, others, 4, 6);
  check_same_bits(params, others);
}

TEST_CASE("SGD that rounds at random goes on from an archive with the same bits") {
  const auto params = parameters(torch::kCPU, torch::kBFloat16);
  const auto options = SGDOptions(0.1).master_weights(MasterWeights::kStochastic);
  SGD optimizer(params, options);
  train(optimizer, params, 1, 3);
  const auto others = copies(params);
  SGD resumed(others, options);
  copy_archive(optimizer, resumed);
  train(optimizer, params, 4, 6);
  train(resumed, others, 4, 6);
  check_same_bits(others, params);
}

TEST_CASE("loading keeps `ema` unless the archive has another") {
  const auto params = parameters(torch::kCPU);
  AdamW plain(params);
  AdamW averaging(params, AdamWOptions().ema(0.5));
  AdamW others(params, AdamWOptions().ema(0.75));
  copy_archive(plain, averaging);
  CHECK(options_of(averaging).ema() == 0.5);
  copy_archive(averaging, others);
  CHECK(options_of(others).ema() == 0.5);
}

TEST_CASE("codes of the wrong sign are refused") {
  const auto params = parameters(torch::kCPU);
  const auto refuses = [&](const char* message, auto change) {
    AdamW optimizer(params, extended());
    AdamW loaded(params, extended());
    train(optimizer, params, 1, 1);
    change(state_of(optimizer, params[0]));
    CHECK_THROWS_WITH(copy_archive(optimizer, loaded), ContainsSubstring(message));
  };
  refuses("exp_avg_codes of parameter 0 of group 0: expected int8 of shape [33, 5]",
          [](auto& state) { state.exp_avg(state.exp_avg().view(torch::kByte)); });
  refuses("exp_avg_sq_codes of parameter 0 of group 0: expected uint8 of shape [33, 5]",
          [](auto& state) { state.exp_avg_sq(state.exp_avg_sq().view(torch::kChar)); });
}

TEST_CASE("loading converts moments to the optimizer's form") {
  const auto params = parameters(torch::kCPU);
  AdamW plain(params, AdamWOptions(1e-2));
  train(plain, params, 1, 3);
  AdamW coded(params, AdamWOptions(1e-2).state_dtype(torch::kChar));
  copy_archive(plain, coded);
  const auto& state = state_of(coded, params[0]);
  CHECK(state.exp_avg().scalar_type() == torch::kChar);
  AdamW again(params, AdamWOptions(1e-2));
  copy_archive(coded, again);
  const auto& numbers = state_of(again, params[0]);
  CHECK(numbers.exp_avg().scalar_type() == torch::kFloat);
  CHECK_FALSE(numbers.exp_avg_units().defined());
  const auto largest = state_of(plain, params[0]).exp_avg_sq().max().item<double>();
  CHECK(
      (numbers.exp_avg_sq() - state_of(plain, params[0]).exp_avg_sq()).abs().max().item<double>() <
      largest / 100);
}

TEST_CASE("state_dtype may be changed to 8 bits and back after the first step") {
  const auto params = parameters(torch::kCPU);
  AdamW optimizer(params, AdamWOptions(1e-2));
  auto& options = static_cast<AdamWOptions&>(optimizer.param_groups()[0].options());
  for (const auto dtype : {torch::kFloat, torch::kChar, torch::kFloat}) {
    options.state_dtype(dtype);
    train(optimizer, params, 1, 2);
    CHECK(state_of(optimizer, params[0]).exp_avg().scalar_type() == dtype);
  }
}

TEST_CASE("averages take the place of parameters as long as the result lives") {
  const auto dtype = GENERATE(torch::kFloat, torch::kBFloat16);
  const auto params = parameters(torch::kCPU, dtype);
  AdamW optimizer(params, AdamWOptions(1e-2).ema(0.5));
  train(optimizer, params, 1, 3);
  const auto before = copies(params, dtype);
  {
    const auto averaged = optimizer.averaged();
    CHECK(params[0].equal(state_of(optimizer, params[0]).ema_param().to(dtype)));
    CHECK_THROWS_WITH(optimizer.step(), ContainsSubstring("step(): the parameters are averages"));
    CHECK_THROWS_WITH((void)optimizer.averaged(), ContainsSubstring("averaged(): the parameters"));
  }
  check_same_bits(params, before);
  train(optimizer, params, 4, 5);
}

TEST_CASE("masters are neither read nor saved while the parameters are averages") {
  const ampfuse::Folder folder;
  const auto params = parameters(torch::kCPU, torch::kBFloat16);
  AdamW optimizer(params, AdamWOptions().ema(0.5).master_weights(MasterWeights::kRemainder));
  train(optimizer, params, 1, 3);
  const auto averaged = optimizer.averaged();
  const auto message = ContainsSubstring("master_params(): the parameters are averages");
  CHECK_THROWS_WITH((void)optimizer.master_params(), message);
  CHECK_THROWS_WITH(ampfuse::checkpoint::save(folder.path, 1, {{"optimizer", optimizer}}), message);
}

TEST_CASE("averaged() that fails leaves all parameters as they were") {
  const auto params = parameters(torch::kCPU);
  AdamW optimizer(params, AdamWOptions().ema(0.5));
  train(optimizer, params, 1, 3);
  params[2].set_data(torch::ones({7}));
  const auto before = copies(params);
  CHECK_THROWS((void)optimizer.averaged());
  check_same_bits(params, before);
  CHECK_NOTHROW((void)optimizer.master_params());
}

TEST_CASE("a parameter that cannot be restored gives a warning, and the others are restored") {
  const auto params = parameters(torch::kCPU);
  AdamW optimizer(params, AdamWOptions().ema(0.5));
  train(optimizer, params, 1, 3);
  const auto before = copies(params);
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  {
    const auto averaged = optimizer.averaged();
    params[0].set_data(torch::ones({7}));
  }
  REQUIRE(warnings.messages.size() == 1);
  CHECK_THAT(warnings.messages[0], ContainsSubstring("a parameter of shape [7] was not restored"));
  CHECK(same_bits(params[2], before[2]));
  CHECK_NOTHROW((void)optimizer.master_params());
}

TEST_CASE("averages are those of the formula, and skipped steps leave them") {
  const auto param = torch::ones({3}).set_requires_grad(true);
  SGD optimizer({param}, SGDOptions(1).ema(0.5));
  const auto average = [&] { return sgd_state_of(optimizer, param).ema_param()[0].item<float>(); };
  param.mutable_grad() = torch::ones({3});
  optimizer.step();
  CHECK(average() == 0);  // the first step sets it
  optimizer.found_inf = torch::ones({});
  optimizer.step();
  CHECK(average() == 0);
  optimizer.found_inf.reset();
  optimizer.step();
  CHECK(average() == -0.5);
  // Momentum that is switched on later does not set it again. It starts from 0, with dampening.
  sgd_options_of(optimizer).momentum(0.9).dampening(0.5);
  optimizer.step();
  CHECK(param[0].item<float>() == -1.5);
  CHECK(average() == -1);
}

TEST_CASE("options that do not fit moments in 8 bits or averages are refused") {
  const auto coded = AdamWOptions().state_dtype(torch::kChar);
  const auto refuses = [](torch::Dtype dtype, AdamWOptions options, const char* message) {
    const auto param = torch::ones({3}, dtype).set_requires_grad(true);
    CHECK_THROWS_WITH(AdamW({param}, options), ContainsSubstring(message));
  };
  refuses(torch::kDouble, coded, "parameter 0 of group 0 is float64, and only half, bfloat16");
  refuses(torch::kFloat, AdamWOptions(coded).amsgrad(true), "group 0 has amsgrad, whose third");
  refuses(torch::kFloat, AdamWOptions().ema(1.0), "ema: expected a decay from 0 to less than 1");
  refuses(torch::kFloat, AdamWOptions().ema_dtype(torch::kHalf), "ema_dtype: expected float32");
  const auto param = torch::ones({3}).set_requires_grad(true);
  AdamW plain({param}, AdamWOptions());
  CHECK_THROWS_WITH((void)plain.averaged(), ContainsSubstring("there are no averages"));
}
