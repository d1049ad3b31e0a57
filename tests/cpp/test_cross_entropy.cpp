// ampfuse::cross_entropy as C++ programs call it. Values are compared with float64 in
// tests/python/test_cross_entropy*.py.
#include <ampfuse/ampfuse.h>
#include <torch/torch.h>

#include "torch_catch.h"

using ampfuse::CrossEntropyOptions;

TEST_CASE("the loss is torch's, and so is the gradient") {
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

TEST_CASE("a scaler's scale is folded into a half gradient") {
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

TEST_CASE("metrics come from the same pass") {
  for (const auto device : devices()) {
    torch::manual_seed(2);
    const auto logits = torch::randn({4, 9}, device);
    const auto target = torch::zeros({4}, torch::TensorOptions(device).dtype(torch::kLong));
    const auto [loss, metrics] = ampfuse::cross_entropy_with_metrics(logits, target);
    CHECK(torch::allclose(metrics.lse, logits.logsumexp(1)));
    CHECK(torch::equal(metrics.argmax, logits.argmax(1)));
    CHECK(torch::allclose(loss, torch::nn::functional::cross_entropy(logits, target)));
  }
}

TEST_CASE("logits that nobody needs any more become their gradient") {
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

TEST_CASE("what is no reduction is refused") {
  CHECK_THROWS_WITH(ampfuse::cross_entropy(torch::zeros({1, 2}), torch::zeros({1}, torch::kLong),
                                           CrossEntropyOptions().reduction("all")),
                    ContainsSubstring("expected none, mean or sum, got all"));
}
