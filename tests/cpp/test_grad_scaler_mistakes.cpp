// Mistakes in the use of ampfuse::GradScaler that raise no error but train on wrong gradients.
#include <ampfuse/ampfuse.h>

#include "optim_models.h"

using ampfuse::GradScaler;
using ampfuse::GradScalerOptions;

namespace {

// Parameters with an optimizer each, and the warnings of their training.
struct Watched {
  Warnings warnings;
  c10::WarningUtils::WarningHandlerGuard guard{&warnings};
  torch::Tensor param = torch::zeros({1}).requires_grad_();
  torch::Tensor other = torch::zeros({1}).requires_grad_();
  torch::optim::SGD optimizer{Tensors{param}, torch::optim::SGDOptions(0.5)};
  torch::optim::SGD second{Tensors{other}, torch::optim::SGDOptions(0.5)};
  ampfuse::SGD fused{Tensors{param}, ampfuse::SGDOptions(0.5)};
  GradScaler scaler{GradScalerOptions().init_scale(64)};

  void backward(const torch::Tensor& of) { scaler.scale(of.sum()).backward(); }

  void backward_anew(const torch::Tensor& of) {
    of.mutable_grad() = torch::Tensor();
    backward(of);
  }

  void expect_one(const char* text) {
    REQUIRE(warnings.messages.size() == 1);
    CHECK_THAT(warnings.messages[0], ContainsSubstring(text));
  }
};

}  // namespace

TEST_CASE("gradients that were computed again after unscaling are warned of") {
  Watched training;
  auto& [warnings, guard, param, other, optimizer, second, fused, scaler] = training;
  for (const bool clips : {false, true}) {
    warnings.messages.clear();
    training.backward_anew(param);
    scaler.clip_grad_norm_(optimizer, 1);
    training.backward_anew(param);  // without an update of the scaler
    if (clips) scaler.clip_grad_norm_(optimizer, 1);
    scaler.step(optimizer);
    scaler.update();
    training.expect_one("were computed again since they were unscaled");
  }
}

TEST_CASE("scaled gradients that are added to unscaled ones are warned of") {
  Watched training;
  const bool resets = GENERATE(false, true);
  const bool clips = GENERATE(false, true);
  training.backward_anew(training.param);
  if (clips) {
    training.scaler.clip_grad_norm_(training.fused, 1);
  } else {
    training.scaler.unscale_(training.fused);
  }
  if (resets) training.fused.zero_grad(/*set_to_none=*/false);
  training.backward(training.param);
  training.scaler.step(training.fused);
  training.expect_one("Unscale or clip once, after the last micro-batch");
}

TEST_CASE("clipping after the loss of another optimizer was scaled is not warned of") {
  Watched training;
  auto& [warnings, guard, param, other, optimizer, second, fused, scaler] = training;
  for (int step = 0; step < 3; ++step) {
    training.backward_anew(param);
    scaler.unscale_(optimizer);
    training.backward_anew(other);
    scaler.unscale_(second);
    torch::nn::utils::clip_grad_norm_(param, 0.5);
    torch::nn::utils::clip_grad_norm_(other, 0.5);
    scaler.step(second);
    scaler.step(optimizer);
    scaler.update();
  }
  CHECK(warnings.messages.empty());
}

TEST_CASE("a backward pass that leaves an unscaled gradient as it is gives no warning") {
  Watched training;
  auto& [warnings, guard, param, other, optimizer, second, fused, scaler] = training;
  training.backward_anew(param);
  scaler.unscale_(fused);
  scaler.scale((param * other).sum()).backward({}, {}, /*create_graph=*/false, Tensors{other});
  scaler.clip_grad_norm_(fused, 0.5);
  scaler.step(fused);
  CHECK(warnings.messages.empty());
}

TEST_CASE("a scaler that loads a state unscales the next gradients") {
  Watched training;
  auto& [warnings, guard, param, other, optimizer, second, fused, scaler] = training;
  training.backward(param);
  scaler.unscale_(optimizer);
  scaler.load_state_dict(scaler.state_dict());
  training.backward_anew(param);
  scaler.step(optimizer);
  CHECK(param.item<float>() == -0.5);
}

TEST_CASE("a loss that is scaled twice is warned of once") {
  Watched training;
  for (int step = 0; step < 2; ++step) {
    const auto loss = training.scaler.scale(training.param.sum());
    training.scaler.scale(loss).backward();
    training.scaler.step(training.fused);
    training.scaler.update();
  }
  training.expect_one("multiplied by the loss scale twice");
}

TEST_CASE("losses that are not scaled any more are warned of at the third step") {
  Watched training;
  training.backward_anew(training.param);
  for (int step = 0; step < 4; ++step) {
    CHECK(training.warnings.messages.empty());
    if (step > 0) training.param.sum().backward();
    training.scaler.step(training.fused);
    training.scaler.update();
  }
  training.expect_one("no loss was multiplied by it");
}

TEST_CASE("one loss for four optimizers with an update after each is not warned of") {
  Watched training;
  std::vector<torch::Tensor> params;
  std::vector<ampfuse::SGD> optimizers;
  for (int i = 0; i < 4; ++i) {
    params.push_back(torch::zeros({1}).requires_grad_());
    optimizers.emplace_back(Tensors{params.back()}, ampfuse::SGDOptions(0.5));
  }
  for (int step = 0; step < 4; ++step) {
    training.backward(torch::cat(params));
    for (auto& optimizer : optimizers) {
      training.scaler.step(optimizer);
      training.scaler.update();
      optimizer.zero_grad();
    }
  }
  CHECK(training.warnings.messages.empty());
}

TEST_CASE("a step of the program with the gradients of a scaler's step is warned of") {
  Watched training;
  const bool writes_back = GENERATE(false, true);
  ampfuse::SGD optimizer(Tensors{training.param},
                         ampfuse::SGDOptions(0.5).write_back_grads(writes_back));
  training.backward_anew(training.param);
  training.scaler.step(optimizer);
  optimizer.step();
  training.scaler.update();
  if (writes_back) {  // the gradients are unscaled
    CHECK(training.warnings.messages.empty());
    return;
  }
  training.expect_one("called beside scaler.step(optimizer)");
  training.warnings.messages.clear();

  training.backward_anew(training.param);
  training.scaler.step(optimizer);
  training.scaler.update();
  optimizer.zero_grad();
  training.param.sum().backward();
  optimizer.step();  // with gradients of a loss that was not scaled
  CHECK(training.warnings.messages.empty());
}
