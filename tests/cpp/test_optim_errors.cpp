// Errors of ampfuse::AdamW.

#include <ampfuse/optim.h>

#include <cmath>
#include <limits>

#include "optim_models.h"

namespace {

using ampfuse::AdamWOptions;

}  // namespace

TEST_CASE("options out of range are refused") {
  const auto refuses = [](const AdamWOptions& options, const std::string& words) {
    const auto params = parameters(torch::kCPU);
    CHECK_THROWS_WITH(ampfuse::AdamW(params, options), ContainsSubstring(words));
  };
  refuses(AdamWOptions(-1), "Invalid learning rate: -1");
  refuses(AdamWOptions(std::numeric_limits<double>::quiet_NaN()), "Invalid learning rate: nan");
  refuses(AdamWOptions(std::numeric_limits<double>::infinity()), "Invalid learning rate: inf");
  refuses(AdamWOptions().betas({1.0, 0.9}), "Invalid beta parameter at index 0: 1");
  refuses(AdamWOptions().betas({0.9, -0.1}), "Invalid beta parameter at index 1: -0.1");
  refuses(AdamWOptions().eps(-1), "Invalid epsilon value: -1");
  refuses(AdamWOptions().weight_decay(-1), "Invalid weight_decay value: -1");
  refuses(AdamWOptions().max_grad_norm(-1), "max_grad_norm: expected None or at least 0, got -1");
  refuses(AdamWOptions().state_dtype(torch::kHalf),
          "state_dtype: expected float32, bfloat16 or int8 for 8 bits, got float16");
}

TEST_CASE("moments in bfloat16 that cannot shrink are warned of at construction") {
  Warnings warnings;
  const c10::WarningUtils::WarningHandlerGuard guard(&warnings);
  const auto params = parameters(torch::kCPU);
  const auto narrow = AdamWOptions().state_dtype(torch::kBFloat16);
  const ampfuse::AdamW quiet(params, AdamWOptions(narrow).betas({0.9, 0.99}));
  CHECK(warnings.messages.empty());
  const ampfuse::AdamW optimizer(params, narrow);
  REQUIRE(warnings.messages.size() == 1);
  CHECK_THAT(warnings.messages[0], ContainsSubstring("second beta of 0.999"));
}

TEST_CASE("options that became invalid are refused before a step writes anything") {
  const auto params = parameters(torch::kCPU);
  const auto before = copies(params);
  ampfuse::AdamW optimizer({Tensors{params[0]}, Tensors{params[2]}});
  feed(params, 1);
  const auto refuses = [&](const AdamWOptions& options, const std::string& words) {
    options_of(optimizer, 1) = options;
    CHECK_THROWS_WITH(optimizer.step(), ContainsSubstring(words));
  };

  refuses(AdamWOptions().eps(-1), "Invalid epsilon value");
  for (const double number : {std::nan(""), std::numeric_limits<double>::infinity()}) {
    refuses(AdamWOptions(number), "Invalid learning rate: ");
    refuses(AdamWOptions().weight_decay(number), "Invalid weight_decay value: ");
  }
  optimizer.grad_scale = torch::Tensor();
  refuses(AdamWOptions(), "grad_scale: expected a tensor, got an undefined one");
  check_same_bits(params, before);
  CHECK(optimizer.state().empty());
}

TEST_CASE("options of another optimizer are refused") {
  const auto params = parameters(torch::kCPU);
  const torch::optim::OptimizerParamGroup group(params,
                                                std::make_unique<torch::optim::AdamWOptions>());
  CHECK_THROWS_WITH(
      ampfuse::AdamW({group}),
      ContainsSubstring("options of group 0: expected ampfuse::AdamOptions or ampfuse::AdamWOpt"));
}

TEST_CASE("a group with invalid options, or with a parameter that is known, is not added") {
  const auto param = torch::ones({2}).requires_grad_();
  const auto other = torch::ones({2}).requires_grad_();
  ampfuse::AdamW optimizer(Tensors{param});
  const auto refuses = [&](const torch::optim::OptimizerParamGroup& group,
                           const std::string& words) {
    CHECK_THROWS_WITH(optimizer.add_param_group(group), ContainsSubstring(words));
    CHECK(optimizer.param_groups().size() == 1);
  };
  refuses(group_of(other, AdamWOptions(-1)), "Invalid learning rate: -1");
  refuses(group_of(other, AdamWOptions().weight_decay(-1)), "Invalid weight_decay value: -1");
  refuses(group_of(other, torch::optim::AdamWOptions()), "options of group 1: expected");
  refuses(Tensors{other, torch::Tensor()}, "parameter 1 of group 1: expected a tensor, got an un");
  refuses(Tensors{other, param}, "in more than one parameter group, or twice in one: parameter 1");
  refuses(Tensors{other, other}, "in more than one parameter group, or twice in one: parameter 1");
  CHECK_THROWS_WITH(ampfuse::AdamW({Tensors{param}, Tensors{param}}),
                    ContainsSubstring("parameter 0 of group 1"));
  optimizer.add_param_group(Tensors{other});
  CHECK(optimizer.param_groups().size() == 2);
}

TEST_CASE("a parameter that torch's add_param_group has added twice is refused by the step") {
  const auto param = torch::ones({2}).requires_grad_();
  ampfuse::AdamW optimizer(Tensors{param});
  param.mutable_grad() = torch::ones({2});
  torch::optim::Optimizer& base = optimizer;
  base.add_param_group(group_of(param, AdamWOptions()));
  CHECK_THROWS_WITH(optimizer.step(), ContainsSubstring("parameter 0 of group 1"));
  CHECK(param.eq(1).all().item<bool>());
}

TEST_CASE("a model that was cast to float after a step keeps its masters, and the step throws") {
  const auto param = torch::ones({2}, torch::kBFloat16).requires_grad_();
  ampfuse::AdamW optimizer(Tensors{param});
  param.mutable_grad() = torch::ones({2}, torch::kBFloat16);
  optimizer.step();
  const torch::Tensor master = optimizer.master_params()[0].clone();
  param.set_data(param.detach().to(torch::kFloat));
  param.mutable_grad() = torch::ones({2});
  CHECK_THROWS_WITH(optimizer.step(), ContainsSubstring("If the model was cast after a step"));
  check_same_bits(optimizer.master_params(), {master});
}

TEST_CASE("fp16 parameters with remainders are refused") {
  const Tensors params = {torch::ones({1}, torch::kBFloat16), torch::ones({1}, torch::kHalf)};
  CHECK_THROWS_WITH(
      ampfuse::AdamW(params, AdamWOptions().master_weights(ampfuse::MasterWeights::kRemainder)),
      ContainsSubstring("parameter 1 of group 0 is float16, and only bfloat16 has a remainder"));
}

TEST_CASE("sparse and misshapen gradients are refused, naming the parameter") {
  const auto first = torch::ones({2, 2}).requires_grad_();
  const auto second = torch::ones({2, 2}).requires_grad_();
  first.mutable_grad() = torch::ones({2, 2});
  ampfuse::AdamW optimizer(Tensors{first, second});

  second.mutable_grad() = torch::ones({2, 2}).to_sparse();
  CHECK_THROWS_WITH(
      optimizer.step(),
      ContainsSubstring("parameter 1 of group 0: Adam does not support sparse gradients"));
  second.mutable_grad() = torch::ones({4});
  CHECK_THROWS_WITH(
      optimizer.step(),
      ContainsSubstring("parameter 1 of group 0: expected a gradient of shape [2, 2], got [4]"));
  CHECK(torch::equal(first, torch::ones({2, 2})));
}

TEST_CASE("a step that the op refuses in one group leaves all groups unchanged") {
  const auto params = parameters(torch::kCPU);
  const torch::Tensor& last = params[2];
  ampfuse::AdamW optimizer({Tensors{params[0]}, Tensors{last}});
  const bool is_first = GENERATE(false, true);
  if (!is_first) train(optimizer, params, 1, 2);
  const auto before = copies(params);
  auto& options = options_of(optimizer, 1);
  std::string message;
  feed(params, 3);

  SECTION("a NaN weight decay") {
    options.weight_decay(std::numeric_limits<double>::quiet_NaN());
    message = "Invalid weight_decay value: nan";
  }
  SECTION("a gradient of another dtype") {
    last.mutable_grad() = last.grad().to(torch::kDouble);
    message = "grads[0]: expected float16, bfloat16 or";
  }
  SECTION("a gradient without memory") {
    last.grad().storage().unsafeGetStorageImpl()->set_data_ptr({});
    message = "grads[0]: its storage is empty";
  }
  SECTION("a gradient that is written and overlaps itself") {
    options.write_back_grads(true);
    last.mutable_grad() = torch::ones({1}).expand(last.sizes());
    message = "grads[0]: more than one element refers to the same memory";
  }
  SECTION("state of another dtype") {
    if (is_first) return;
    auto& state = state_of(optimizer, last);
    state.exp_avg_sq(state.exp_avg_sq().to(torch::kBFloat16));
    message = "exp_avg_sqs[0]: expected dtype float32 as exp_avgs[0], got bfloat16";
  }

  for (int attempt = 0; attempt < 2; ++attempt) {
    CHECK_THROWS_WITH(optimizer.step(), ContainsSubstring(message));
    check_same_bits(params, before);
  }
}
