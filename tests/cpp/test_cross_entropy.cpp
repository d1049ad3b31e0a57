// ampfuse::cross_entropy as C++ programs call it. tests/python/losses/test_cross_entropy*.py
// compare values with float64.
#include <ampfuse/ampfuse.h>
#include <torch/torch.h>

#include <cmath>
#include <sstream>

#include "torch_catch.h"

using ampfuse::CrossEntropyLoss;
using ampfuse::CrossEntropyOptions;

namespace {

// Logits of six rows, weights of their nine classes, and targets, of which two are ignored.
struct Rows {
  at::Tensor logits, weight, target;

  explicit Rows(torch::Device device, torch::Dtype dtype = torch::kFloat) {
    torch::manual_seed(1);
    logits = torch::randn({6, 9}, device).to(dtype).requires_grad_();
    weight = torch::rand({9}, device);
    target = torch::randint(9, {6}, torch::TensorOptions(device).dtype(torch::kLong));
    target.slice(0, 0, 6, 3).fill_(-100);
  }

  CrossEntropyOptions options() const {
    return CrossEntropyOptions().weight(weight).label_smoothing(0.1);
  }

  at::Tensor gradient(const at::Tensor& loss) const {
    return torch::autograd::grad({loss}, {logits})[0];
  }
};

}  // namespace

TEST_CASE("cross_entropy has the loss and the gradient of torch") {
  for (const auto device : devices()) {
    const Rows rows(device);
    const auto loss = ampfuse::cross_entropy(rows.logits, rows.target, rows.options());
    const auto expected = torch::nn::functional::cross_entropy(
        rows.logits, rows.target,
        torch::nn::functional::CrossEntropyFuncOptions().weight(rows.weight).label_smoothing(0.1));
    CHECK(torch::allclose(loss, expected));
    CHECK(torch::allclose(rows.gradient(loss), rows.gradient(expected), 1e-5, 1e-7));
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

    // A module with the scaler equals the function with its scale.
    const Rows rows(device, torch::kHalf);
    CrossEntropyLoss criterion(rows.options(), &scaler);
    const auto ours = criterion(rows.logits, rows.target);
    const auto expected = ampfuse::cross_entropy(rows.logits, rows.target,
                                                 rows.options().grad_scale(scaler.scale_tensor()));
    CHECK(torch::equal(ours, expected));
    // Forward forms both gradients, each for a backward pass with the scale.
    CHECK(torch::equal(rows.gradient(scaler.scale(ours)), rows.gradient(scaler.scale(expected))));
  }
}

TEST_CASE("cross_entropy_with_metrics returns lse, argmax and correct") {
  for (const auto device : devices()) {
    const Rows rows(device);
    const auto [loss, metrics] = ampfuse::cross_entropy_with_metrics(rows.logits, rows.target);
    const auto argmax = rows.logits.argmax(1);
    CHECK(torch::allclose(metrics.lse, rows.logits.logsumexp(1)));
    CHECK(torch::equal(metrics.argmax, argmax));
    CHECK(torch::equal(metrics.correct, argmax.eq(rows.target)));  // false if ignored
    CHECK(torch::allclose(loss, torch::nn::functional::cross_entropy(rows.logits, rows.target)));
    const auto [mean, of_all] = ampfuse::cross_entropy_with_metrics(
        rows.logits, rows.logits.softmax(1).detach(), CrossEntropyOptions().label_smoothing(0.1));
    CHECK(of_all.correct.all().item<bool>());
  }
}

TEST_CASE("cross_entropy_ overwrites logits with their gradient") {
  for (const auto device : devices()) {
    const Rows rows(device);
    auto logits = rows.logits * 1;
    ampfuse::cross_entropy_(logits, rows.target).backward();
    CHECK(torch::equal(logits, rows.logits.grad()));
    CHECK_THROWS_WITH(
        ampfuse::cross_entropy_(logits, rows.target, CrossEntropyOptions().reduction("none")),
        ContainsSubstring("expected mean or sum"));
    CHECK_THROWS_WITH(
        ampfuse::cross_entropy(logits, rows.target, CrossEntropyOptions().reduction("all")),
        ContainsSubstring("expected \"none\", \"mean\" or \"sum\", got all"));
  }
}

TEST_CASE("micro-batches with the denominator of the batch add up to its gradient") {
  for (const auto device : devices()) {
    const Rows rows(device);
    const auto& [logits, weight, target] = rows;
    const auto denominator = torch::tensor(4.0, device);
    CrossEntropyLoss criterion;
    const auto parts = criterion(logits.narrow(0, 0, 2), target.narrow(0, 0, 2), denominator) +
                       criterion(logits.narrow(0, 2, 4), target.narrow(0, 2, 4), denominator);
    CHECK(torch::equal(rows.gradient(parts), rows.gradient(criterion(logits, target))));
  }
}

TEST_CASE("CrossEntropyLoss works as an AnyModule, with a disabled scaler or with none") {
  const auto logits = torch::zeros({1, 2}).requires_grad_();
  const auto target = torch::zeros({1}, torch::kLong);
  torch::nn::AnyModule any{CrossEntropyLoss()};
  CHECK(any.forward<at::Tensor>(logits, target).item<float>() == Approx(std::log(2.0)));

  ampfuse::GradScaler off(ampfuse::GradScalerOptions().enabled(false));
  for (ampfuse::GradScaler* const scaler : {&off, static_cast<ampfuse::GradScaler*>(nullptr)}) {
    CrossEntropyLoss criterion(CrossEntropyOptions(), scaler);
    const auto grad = torch::autograd::grad({criterion(logits, target)}, {logits})[0];
    CHECK(torch::equal(grad, torch::tensor({{-0.5f, 0.5f}})));
  }
  CHECK_THROWS_WITH(CrossEntropyLoss(CrossEntropyOptions().grad_scale(torch::ones({})), &off),
                    ContainsSubstring("pass either scaler or grad_scale, not both"));
}

TEST_CASE("CrossEntropyLoss has its weight as a buffer, which is cloned, saved and loaded") {
  const auto weight = torch::tensor({1.0f, 2.0f});
  CrossEntropyLoss criterion(CrossEntropyOptions().weight(weight));
  const auto copy = std::dynamic_pointer_cast<ampfuse::CrossEntropyLossImpl>(criterion->clone());
  copy->weight.zero_();
  copy->to(torch::kDouble);

  CHECK(torch::equal(criterion->weight, weight));
  CHECK(criterion->named_buffers().contains("weight"));
  CHECK(copy->named_buffers()["weight"].scalar_type() == torch::kDouble);
  CHECK(copy->weight.scalar_type() == torch::kDouble);
  CHECK(CrossEntropyLoss()->named_buffers().is_empty());

  const auto logits = torch::tensor({{1.0f, 0.0f}, {0.0f, 0.0f}});
  const auto target = torch::tensor({0, 1});
  criterion->options.weight(torch::tensor({1.0f, 5.0f}));
  CHECK(torch::equal(criterion(logits, target),
                     ampfuse::cross_entropy(logits, target, criterion->options)));

  CrossEntropyLoss loaded(CrossEntropyOptions().weight(torch::zeros({2})));
  std::stringstream file;
  torch::save(criterion, file);
  torch::load(loaded, file);
  CHECK(torch::equal(loaded->weight, weight));

  std::ostringstream text;
  text << *criterion << *CrossEntropyLoss(CrossEntropyOptions().z_loss(0.5).softcap(30));
  CHECK(text.str() ==
        "ampfuse::CrossEntropyLoss(reduction=mean, ignore_index=-100, label_smoothing=0)"
        "ampfuse::CrossEntropyLoss(reduction=mean, ignore_index=-100, label_smoothing=0, "
        "z_loss=0.5, softcap=30)");
}

TEST_CASE("a loss follows its scaler when it moves, and throws when it is gone") {
  const auto logits = torch::zeros({1, 2}).requires_grad_();
  const auto target = torch::tensor({0});
  const auto options = ampfuse::GradScalerOptions().device(torch::kCPU).init_scale(64);
  struct Trainer {
    ampfuse::GradScaler scaler;
    CrossEntropyLoss criterion{CrossEntropyOptions(), &scaler};
  };
  Trainer first{ampfuse::GradScaler(options)};
  Trainer moved = std::move(first);
  moved.scaler.scale_tensor();
  moved.scaler.update(16.0);
  moved.scaler.scale(moved.criterion(logits, target)).backward();
  CHECK(torch::equal(logits.grad(), torch::tensor({{-8.0f, 8.0f}})));

  const auto copy = moved.criterion->clone();
  moved.scaler = ampfuse::GradScaler(options);
  const std::string words = "CrossEntropyLoss: its GradScaler was destroyed";
  CHECK_THROWS_WITH(moved.criterion(logits, target), ContainsSubstring(words));
  CHECK_THROWS_WITH(
      std::dynamic_pointer_cast<ampfuse::CrossEntropyLossImpl>(copy)->forward(logits, target),
      ContainsSubstring(words));
  moved.criterion->scaler = &moved.scaler;
  CHECK(moved.criterion(logits, target).item<float>() == Approx(std::log(2.0)));
}

TEST_CASE("a step throws if a loss module was called and no loss was scaled") {
  const auto logits = torch::zeros({1, 2}).requires_grad_();
  const auto target = torch::tensor({0});
  ampfuse::GradScaler scaler(ampfuse::GradScalerOptions().device(torch::kCPU));
  CrossEntropyLoss criterion(CrossEntropyOptions(), &scaler);
  torch::optim::SGD optimizer({logits}, 1.0);
  criterion(logits, target).backward();
  const std::string words = " but no loss was scaled since the last update";
  CHECK_THROWS_WITH(scaler.step(optimizer), ContainsSubstring("Attempted step" + words));
  CHECK_THROWS_WITH(scaler.unscale_(optimizer), ContainsSubstring("Attempted unscale_" + words));
  scaler.scale(criterion(logits, target)).backward();
  scaler.step(optimizer);
  scaler.update();
  criterion(logits, target).backward();
  CHECK_THROWS_WITH(scaler.step(optimizer), ContainsSubstring("Attempted step" + words));
  (criterion(logits, target) * scaler.get_scale()).backward();
  scaler.step(optimizer);
}

TEST_CASE("reductions may be torch's constants, and options are printed") {
  const auto sum = CrossEntropyOptions().reduction(torch::kSum);
  CHECK(sum.reduction() == "sum");
  CHECK(CrossEntropyOptions().reduction(torch::kNone).reduction() == "none");
  CHECK(ampfuse::LinearCrossEntropyOptions().reduction(torch::kMean).reduction() == "mean");
  std::ostringstream text;
  text << sum << ampfuse::LinearCrossEntropyOptions().chunk_rows(4).logits_dtype(torch::kFloat);
  CHECK(text.str() ==
        "ampfuse::CrossEntropyOptions(reduction=sum, ignore_index=-100, label_smoothing=0)"
        "ampfuse::LinearCrossEntropyOptions(reduction=mean, ignore_index=-100, label_smoothing=0, "
        "chunk_rows=4, logits_dtype=float32)");
}

TEST_CASE("accumulate gives the loss and gradients of the whole batch") {
  torch::manual_seed(3);
  const auto weight = torch::randn({5, 3}).requires_grad_();
  const auto inputs = torch::randn({6, 5});
  const auto targets = torch::tensor({0, 2, 1, 1, -100, 2});
  const auto whole = ampfuse::cross_entropy(inputs.matmul(weight), targets);
  const auto expected = torch::autograd::grad({whole}, {weight})[0];
  std::vector<torch::data::Example<>> micro_batches;
  for (const int64_t first : {0, 4}) {
    micro_batches.emplace_back(inputs.slice(0, first, first + 4),
                               targets.slice(0, first, first + 4));
  }
  const auto step = [&](const auto& part, const torch::Tensor& denominator) {
    return ampfuse::cross_entropy(part.data.matmul(weight), part.target,
                                  CrossEntropyOptions().denominator(denominator));
  };
  const auto count = [](const auto& part) {
    return part.target.ne(-100).sum().template item<int>();
  };
  ampfuse::GradScaler scaler(ampfuse::GradScalerOptions().device(torch::kCPU).init_scale(8));

  CHECK(torch::allclose(ampfuse::accumulate(step, micro_batches), whole));
  CHECK(torch::allclose(weight.grad(), expected));
  weight.mutable_grad() = torch::Tensor();
  CHECK(torch::allclose(ampfuse::accumulate(step, micro_batches, &scaler, count), whole));
  CHECK(torch::allclose(weight.grad(), 8 * expected));

  const auto scaled = [&](const auto& part, const torch::Tensor& denominator) {
    return scaler.scale(step(part, denominator));
  };
  CHECK_THROWS_WITH(ampfuse::accumulate(scaled, micro_batches, &scaler),
                    ContainsSubstring("step has scaled the loss, which the scaler would scale"));

  micro_batches.clear();
  CHECK_THROWS_WITH(ampfuse::accumulate(step, micro_batches),
                    ContainsSubstring("micro_batches: expected at least one, got none"));
  const std::vector<std::pair<torch::Tensor, torch::Tensor>> pairs = {{inputs, inputs}};
  const auto rows = [&](const auto& pair, const auto&) { return pair.first.matmul(weight); };
  CHECK_THROWS_WITH(ampfuse::accumulate(rows, pairs),
                    ContainsSubstring("expected micro-batches with integer targets, got float32"));
  CHECK_THROWS_WITH(ampfuse::accumulate(rows, pairs, nullptr, [](const auto&) { return 6; }),
                    ContainsSubstring("step: expected a loss of one element, got 18"));
}
