// ampfuse::cross_entropy as C++ programs call it. tests/python/losses/test_cross_entropy*.py
// compare values with float64.
#include <ampfuse/ampfuse.h>
#include <torch/torch.h>

#include <cmath>
#include <memory>
#include <sstream>

#include "torch_catch.h"

using ampfuse::CrossEntropyOptions;

TEST_CASE("cross_entropy has the loss and the gradient of torch's") {
  for (const auto device : devices()) {
    torch::manual_seed(1);
    const auto logits = torch::randn({6, 50}, device).requires_grad_();
    const auto target = torch::randint(50, {6}, torch::TensorOptions(device).dtype(torch::kLong));
    const auto weight = torch::rand({50}, device);

    const auto loss = ampfuse::cross_entropy(
        logits, target, CrossEntropyOptions().weight(weight).label_smoothing(0.1));
    const auto expected = torch::nn::functional::cross_entropy(
        logits, target,
        torch::nn::functional::CrossEntropyFuncOptions().weight(weight).label_smoothing(0.1));

    CHECK(torch::allclose(loss, expected));
    CHECK(torch::allclose(torch::autograd::grad({loss}, {logits})[0],
                          torch::autograd::grad({expected}, {logits})[0], 1e-5, 1e-7));
  }
}

TEST_CASE("the scale of a scaler is folded into an fp16 gradient") {
  for (const auto device : devices()) {
    ampfuse::GradScaler scaler(ampfuse::GradScalerOptions().init_scale(1024).device(device));
    const auto logits = torch::zeros({1, 2}, device).to(torch::kHalf).requires_grad_();
    const auto target = torch::zeros({1}, torch::TensorOptions(device).dtype(torch::kLong));

    const auto loss = ampfuse::cross_entropy(
        logits, target, CrossEntropyOptions().grad_scale(scaler.scale_tensor()));
    scaler.scale(loss).backward();

    CHECK(loss.scalar_type() == torch::kFloat);
    CHECK(logits.grad()[0][0].item<float>() == -512);
    CHECK(logits.grad()[0][1].item<float>() == 512);
  }
}

TEST_CASE("cross_entropy_with_metrics returns lse, argmax and correct") {
  for (const auto device : devices()) {
    torch::manual_seed(2);
    const auto logits = torch::randn({4, 9}, device);
    const auto target = torch::zeros({4}, torch::TensorOptions(device).dtype(torch::kLong));
    const auto [loss, metrics] = ampfuse::cross_entropy_with_metrics(logits, target);
    CHECK(torch::allclose(metrics.lse, logits.logsumexp(1)));
    CHECK(torch::equal(metrics.argmax, logits.argmax(1)));
    CHECK(torch::equal(metrics.correct, logits.argmax(1).eq(0)));
    const auto [mean, of_all] = ampfuse::cross_entropy_with_metrics(
        logits, logits.softmax(1), CrossEntropyOptions().label_smoothing(0.1));
    CHECK(of_all.correct.all().item<bool>());
    const auto [none, of_ignored] =
        ampfuse::cross_entropy_with_metrics(logits, target, CrossEntropyOptions().ignore_index(0));
    CHECK_FALSE(of_ignored.correct.any().item<bool>());
    CHECK(torch::allclose(loss, torch::nn::functional::cross_entropy(logits, target)));
  }
}

TEST_CASE("cross_entropy_ overwrites logits with their gradient") {
  for (const auto device : devices()) {
    torch::manual_seed(3);
    const auto leaf = torch::randn({4, 9}, device).requires_grad_();
    const auto target = torch::zeros({4}, torch::TensorOptions(device).dtype(torch::kLong));
    auto logits = leaf * 1;
    ampfuse::cross_entropy_(logits, target).backward();
    CHECK(torch::equal(logits, leaf.grad()));
    CHECK_THROWS_WITH(
        ampfuse::cross_entropy_(logits, target, CrossEntropyOptions().reduction("none")),
        ContainsSubstring("expected mean or sum"));
  }
}

TEST_CASE("cross_entropy refuses an unknown reduction") {
  CHECK_THROWS_WITH(ampfuse::cross_entropy(torch::zeros({1, 2}), torch::zeros({1}, torch::kLong),
                                           CrossEntropyOptions().reduction("all")),
                    ContainsSubstring("expected \"none\", \"mean\" or \"sum\", got all"));
}

TEST_CASE("CrossEntropyLoss equals the function with the scale of the module's scaler") {
  for (const auto device : devices()) {
    torch::manual_seed(4);
    ampfuse::GradScaler scaler(ampfuse::GradScalerOptions().init_scale(1024).device(device));
    const auto weight = torch::rand({9}, device);
    ampfuse::CrossEntropyLoss criterion(CrossEntropyOptions().weight(weight).label_smoothing(0.1),
                                        &scaler);
    const auto logits = torch::randn({4, 9}, device).to(torch::kHalf).requires_grad_();
    const auto target = torch::zeros({4}, torch::TensorOptions(device).dtype(torch::kLong));

    const auto loss = criterion(logits, target);
    const auto scale = scaler.scale_tensor();
    const auto expected = ampfuse::cross_entropy(
        logits, target,
        CrossEntropyOptions().weight(weight).label_smoothing(0.1).grad_scale(scale));

    CHECK(torch::equal(loss, expected));
    // Forward forms both gradients, each for a backward pass with the scale.
    CHECK(torch::equal(torch::autograd::grad({scaler.scale(loss)}, {logits})[0],
                       torch::autograd::grad({scaler.scale(expected)}, {logits})[0]));
  }
}

TEST_CASE("micro-batches with the denominator of the batch add up to its gradient") {
  for (const auto device : devices()) {
    torch::manual_seed(5);
    const auto logits = torch::randn({6, 9}, device).requires_grad_();
    const auto target = torch::zeros({6}, torch::TensorOptions(device).dtype(torch::kLong));
    const auto denominator = torch::tensor(6.0, device);
    ampfuse::CrossEntropyLoss criterion;
    const auto whole = torch::autograd::grad({criterion(logits, target)}, {logits})[0];
    const auto parts = criterion(logits.narrow(0, 0, 2), target.narrow(0, 0, 2), denominator) +
                       criterion(logits.narrow(0, 2, 4), target.narrow(0, 2, 4), denominator);
    CHECK(torch::equal(torch::autograd::grad({parts}, {logits})[0], whole));
  }
}

TEST_CASE("CrossEntropyLoss works as an AnyModule") {
  torch::nn::AnyModule any{ampfuse::CrossEntropyLoss()};
  const auto loss = any.forward<at::Tensor>(torch::zeros({1, 2}), torch::zeros({1}, torch::kLong));
  CHECK(loss.item<float>() == Approx(std::log(2.0)));
}

TEST_CASE("CrossEntropyLoss works with a disabled scaler or with none") {
  ampfuse::GradScaler off(ampfuse::GradScalerOptions().enabled(false));
  const auto logits = torch::zeros({1, 2}).requires_grad_();
  const auto target = torch::zeros({1}, torch::kLong);
  for (ampfuse::GradScaler* const scaler : {&off, static_cast<ampfuse::GradScaler*>(nullptr)}) {
    ampfuse::CrossEntropyLoss criterion(CrossEntropyOptions(), scaler);
    const auto grad = torch::autograd::grad({criterion(logits, target)}, {logits})[0];
    CHECK(torch::equal(grad, torch::tensor({{-0.5f, 0.5f}})));
  }
  CHECK_THROWS_WITH(
      ampfuse::CrossEntropyLoss(CrossEntropyOptions().grad_scale(torch::ones({})), &off),
      ContainsSubstring("pass either scaler or grad_scale, not both"));
}

TEST_CASE("CrossEntropyLoss has its weight as a buffer, which clone copies") {
  const auto weight = torch::tensor({1.0f, 2.0f});
  const ampfuse::CrossEntropyLoss criterion(CrossEntropyOptions().weight(weight));
  const auto copy = std::dynamic_pointer_cast<ampfuse::CrossEntropyLossImpl>(criterion->clone());
  copy->weight.zero_();
  copy->to(torch::kDouble);

  CHECK(torch::equal(criterion->weight, weight));
  CHECK(criterion->named_buffers().contains("weight"));
  CHECK(copy->named_buffers()["weight"].scalar_type() == torch::kDouble);
  CHECK(copy->weight.scalar_type() == torch::kDouble);
  CHECK(ampfuse::CrossEntropyLoss()->named_buffers().is_empty());

  std::ostringstream text;
  text << *criterion;
  CHECK(text.str() ==
        "ampfuse::CrossEntropyLoss(reduction=mean, ignore_index=-100, label_smoothing=0)");
  text.str("");
  text << *ampfuse::CrossEntropyLoss(CrossEntropyOptions().z_loss(0.5).softcap(30));
  CHECK_THAT(text.str(), ContainsSubstring("label_smoothing=0, z_loss=0.5, softcap=30)"));
}

TEST_CASE("CrossEntropyLoss is saved and loaded with its weight") {
  const auto weight = torch::tensor({1.0f, 2.0f});
  ampfuse::CrossEntropyLoss saved(CrossEntropyOptions().weight(weight));
  ampfuse::CrossEntropyLoss loaded(CrossEntropyOptions().weight(torch::zeros({2})));
  std::stringstream file;
  torch::save(saved, file);
  torch::load(loaded, file);
  CHECK(torch::equal(loaded->weight, weight));
}
