// ampfuse::linear_cross_entropy as C++ programs call it.
// tests/python/losses/test_linear_cross_entropy*.py compare values with float64.
#include <ampfuse/ampfuse.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <barrier>
#include <sstream>
#include <thread>

#include "torch_catch.h"

using ampfuse::LinearCrossEntropyOptions;

namespace {

// Hidden states, a weight, a bias and targets; every third target is ignored.
struct Head {
  at::Tensor hidden, weight, bias, target;

  explicit Head(torch::Device device, torch::Dtype dtype = torch::kFloat) {
    torch::manual_seed(1);
    const auto options = torch::TensorOptions(device).dtype(dtype);
    hidden = torch::randn({9, 6}, options).requires_grad_();
    weight = torch::randn({40, 6}, options).requires_grad_();
    bias = torch::randn({40}, options).requires_grad_();
    target = torch::randint(40, {9}, options.dtype(torch::kLong));
    target.slice(0, 0, 9, 3).fill_(-100);
  }

  std::vector<at::Tensor> gradients(const at::Tensor& loss) const {
    return torch::autograd::grad({loss}, {hidden, weight, bias});
  }
};

constexpr int kRanks = 2;

// Memory through which the threads of a group exchange tensors.
struct Table {
  std::barrier<> barrier{kRanks};
  std::array<at::Tensor, kRanks> of_rank;

  std::vector<at::Tensor> gather(int rank, const at::Tensor& mine) {
    of_rank[rank] = mine.clone();
    barrier.arrive_and_wait();
    std::vector<at::Tensor> all(of_rank.begin(), of_rank.end());
    barrier.arrive_and_wait();
    return all;
  }
};

class Done : public c10d::Work {
 public:
  bool wait(std::chrono::milliseconds) override { return true; }
};

// A c10d backend whose ranks are threads.
class Threads : public c10d::Backend {
 public:
  Threads(Table& table, int rank) : Backend(rank, kRanks), table_(table) {}

  const std::string getBackendName() const override { return "threads"; }

  c10::intrusive_ptr<c10d::Work> allgather_into_tensor_coalesced(
      std::vector<at::Tensor>& all, std::vector<at::Tensor>& mine,
      const c10d::AllgatherOptions&) override {
    all[0].copy_(at::cat(table_.gather(getRank(), mine[0])));
    return c10::make_intrusive<Done>();
  }
  c10::intrusive_ptr<c10d::Work> allreduce(std::vector<at::Tensor>& sums,
                                           const c10d::AllreduceOptions&) override {
    const auto all = table_.gather(getRank(), sums[0]);
    sums[0].copy_(all[0] + all[1]);
    return c10::make_intrusive<Done>();
  }

 private:
  Table& table_;
};

}  // namespace

TEST_CASE("linear_cross_entropy equals torch's linear followed by cross_entropy") {
  const auto by_class = GENERATE(false, true);
  for (const auto device : devices()) {
    const Head head(device);
    const auto class_weight = torch::rand({40}, device);
    const auto options =
        LinearCrossEntropyOptions().class_weight(class_weight).label_smoothing(0.1);
    const auto loss = ampfuse::linear_cross_entropy(
        head.hidden, head.weight, head.target, head.bias,
        by_class ? LinearCrossEntropyOptions(options).chunk_classes(16)
                 : LinearCrossEntropyOptions(options).chunk_rows(4));
    const auto expected = torch::nn::functional::cross_entropy(
        torch::nn::functional::linear(head.hidden, head.weight, head.bias), head.target,
        torch::nn::functional::CrossEntropyFuncOptions().weight(class_weight).label_smoothing(0.1));
    CHECK(torch::allclose(loss, expected));
    const auto gradients = head.gradients(loss);
    const auto right = head.gradients(expected);
    for (size_t i = 0; i < right.size(); ++i) {
      CHECK(torch::allclose(gradients[i], right[i], 1e-5, 1e-6));
    }
  }
}

TEST_CASE("accumulate_into takes the gradient of the weight in place of its grad") {
  for (const auto device : devices()) {
    const Head head(device, torch::kBFloat16);
    const auto buffer = torch::zeros({40, 6}, device);
    ampfuse::GradScaler scaler(ampfuse::GradScalerOptions().init_scale(1024).device(device));
    const auto options =
        LinearCrossEntropyOptions().accumulate_into(buffer).grad_scale(scaler.scale_tensor());
    scaler.scale(ampfuse::linear_cross_entropy(head.hidden, head.weight, head.target, {}, options))
        .backward();
    CHECK_FALSE(head.weight.grad().defined());
    const auto loss = ampfuse::linear_cross_entropy(head.hidden, head.weight, head.target);
    const auto expected = torch::autograd::grad({loss}, {head.weight})[0];
    CHECK(torch::allclose(buffer / 1024, expected.to(torch::kFloat), 1e-2, 1e-3));
  }
}

TEST_CASE("logits of bfloat16 products may be float or bfloat16") {
  for (const auto device : devices()) {
    const Head head(device, torch::kBFloat16);
    const auto loss = [&](torch::Dtype dtype) {
      return ampfuse::linear_cross_entropy(head.hidden, head.weight, head.target, head.bias,
                                           LinearCrossEntropyOptions().logits_dtype(dtype))
          .to(torch::kDouble);
    };
    const auto logits =
        torch::nn::functional::linear(head.hidden.to(torch::kDouble),
                                      head.weight.to(torch::kDouble), head.bias.to(torch::kDouble));
    const auto exact = torch::nn::functional::cross_entropy(logits, head.target);
    CHECK(torch::allclose(loss(torch::kFloat), exact, 1e-6, 0));
    const auto rounded = torch::nn::functional::cross_entropy(
        logits.to(torch::kBFloat16).to(torch::kDouble), head.target);
    CHECK(torch::allclose(loss(torch::kBFloat16), rounded, 1e-3, 0));
    CHECK_THROWS_WITH(loss(torch::kHalf),
                      ContainsSubstring("logits_dtype: expected bfloat16 or float32"));
  }
}

TEST_CASE("linear_cross_entropy_with_metrics returns the metrics of the logits") {
  for (const auto device : devices()) {
    const Head head(device);
    const auto logits = torch::nn::functional::linear(head.hidden, head.weight, head.bias);
    const auto [loss, metrics] = ampfuse::linear_cross_entropy_with_metrics(
        head.hidden, head.weight, head.target, head.bias);
    CHECK(torch::allclose(metrics.lse, logits.logsumexp(1)));
    CHECK(torch::equal(metrics.argmax, logits.argmax(1)));
    CHECK(torch::equal(metrics.correct, logits.argmax(1).eq(head.target)));  // false if ignored
    const auto [mean, of_all] = ampfuse::linear_cross_entropy_with_metrics(
        head.hidden, head.weight, logits.softmax(1).detach(), head.bias);
    CHECK(of_all.correct.all().item<bool>());
  }
}

TEST_CASE("under autocast loss and gradients are float, not rounded to bfloat16") {
  for (const auto device : devices()) {
    const Head head(device);
    at::Tensor loss;
    {
      const ampfuse::AutocastGuard autocast(device.type(), torch::kBFloat16);
      loss = ampfuse::linear_cross_entropy(head.hidden, head.weight, head.target, head.bias);
    }
    CHECK(loss.scalar_type() == torch::kFloat);
    const auto gradient = head.gradients(loss)[1];
    CHECK(gradient.scalar_type() == torch::kFloat);
    CHECK_FALSE(torch::equal(gradient, gradient.to(torch::kBFloat16).to(torch::kFloat)));
  }
}

TEST_CASE("linear_cross_entropy refuses mixed dtypes, an unknown reduction and undefined tensors") {
  const Head head(torch::kCPU);
  CHECK_THROWS_WITH(
      ampfuse::linear_cross_entropy(head.hidden, head.weight.to(torch::kHalf), head.target),
      ContainsSubstring("of one dtype, or autocast, got hidden of float32, weight of float16"));
  CHECK_THROWS_WITH(ampfuse::linear_cross_entropy(head.hidden, head.weight, head.target, {},
                                                  LinearCrossEntropyOptions().reduction("all")),
                    ContainsSubstring("expected \"none\", \"mean\" or \"sum\", got all"));
  CHECK_THROWS_WITH(ampfuse::linear_cross_entropy(torch::Tensor(), head.weight, head.target),
                    ContainsSubstring("linear_cross_entropy: hidden: expected a tensor, got none"));
}

TEST_CASE("LinearCrossEntropyLoss holds the layer, and clone copies it") {
  ampfuse::GradScaler scaler(ampfuse::GradScalerOptions().device(torch::kCPU));
  const torch::nn::LinearOptions layer(6, 40);
  const auto class_weight = torch::rand({40});
  ampfuse::LinearCrossEntropyLoss criterion(
      layer, LinearCrossEntropyOptions().class_weight(class_weight), &scaler);
  const Head head(torch::kCPU);
  const auto loss = criterion(head.hidden, head.target);
  const auto expected = torch::nn::functional::cross_entropy(
      criterion->linear(head.hidden), head.target,
      torch::nn::functional::CrossEntropyFuncOptions().weight(class_weight));
  CHECK(torch::allclose(loss, expected));
  CHECK(criterion->named_parameters().contains("linear.weight"));
  CHECK(criterion->named_parameters().contains("linear.bias"));
  CHECK(criterion->named_buffers().contains("weight"));

  const auto copy =
      std::dynamic_pointer_cast<ampfuse::LinearCrossEntropyLossImpl>(criterion->clone());
  CHECK(torch::equal(copy->forward(head.hidden, head.target), loss));
  {
    const torch::NoGradGuard no_grad;
    copy->linear->weight.zero_();
    copy->class_weight.zero_();
  }
  CHECK(torch::equal(criterion(head.hidden, head.target), loss));
  CHECK_THROWS_WITH(ampfuse::LinearCrossEntropyLoss(
                        layer, LinearCrossEntropyOptions().grad_scale(torch::ones({})), &scaler),
                    ContainsSubstring("pass either scaler or grad_scale, not both"));
  {
    const ampfuse::GradScaler moved = std::move(scaler);
    CHECK(torch::equal(criterion(head.hidden, head.target), loss));
  }
  CHECK_THROWS_WITH(criterion(head.hidden, head.target),
                    ContainsSubstring("LinearCrossEntropyLoss: its GradScaler was destroyed"));
  std::ostringstream text;
  text << *criterion;
  CHECK_THAT(text.str(), ContainsSubstring("LinearCrossEntropyLoss(in_features=6"));
}

TEST_CASE("torch::nn::Linear rounds the product of a 3-D input before it adds the bias") {
  // So its bits differ from those of Python's nn.Linear, which calls at::linear.
  torch::manual_seed(0);
  torch::nn::Linear layer(64, 32);
  layer->to(torch::kBFloat16);
  const torch::NoGradGuard no_grad;
  const auto input = torch::randn({2, 16, 64}).to(torch::kBFloat16);
  const auto as_in_python = at::linear(input, layer->weight, layer->bias);
  CHECK(!torch::equal(layer(input), as_in_python));
  CHECK(torch::equal(layer(input), input.matmul(layer->weight.t()) + layer->bias));
  CHECK(torch::equal(layer(input.flatten(0, 1)).view_as(as_in_python), as_in_python));
}

TEST_CASE("vocabulary shards give the loss and gradients of the whole vocabulary") {
  const Head head(torch::kCPU);
  const int64_t middle = 23;
  const auto options = LinearCrossEntropyOptions().label_smoothing(0.1).chunk_rows(4);
  const auto whole =
      ampfuse::linear_cross_entropy(head.hidden, head.weight, head.target, {}, options);
  const auto right = torch::autograd::grad({whole}, {head.hidden, head.weight});

  Table table;
  std::array<at::Tensor, kRanks> losses;
  std::array<std::vector<at::Tensor>, kRanks> gradients;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kRanks; ++rank) {
    threads.emplace_back([&, rank] {
      const std::string name = "member " + std::to_string(rank);
      const auto group = c10::make_intrusive<c10d::ProcessGroup>(rank, kRanks);
      group->setBackend(c10::kCPU, c10d::ProcessGroup::CUSTOM,
                        c10::make_intrusive<Threads>(table, rank));
      c10d::register_process_group(name, group);
      const int64_t first = rank == 0 ? 0 : middle;
      const auto hidden = head.hidden.detach().requires_grad_();
      const auto weight =
          head.weight.detach().slice(0, first, rank == 0 ? middle : 40).clone().requires_grad_();
      auto shared = options;
      shared.shard(ampfuse::VocabShard{name, kRanks, first, 40});
      losses[rank] = ampfuse::linear_cross_entropy(hidden, weight, head.target, {}, shared);
      gradients[rank] = torch::autograd::grad({losses[rank]}, {hidden, weight});
      c10d::unregister_process_group(name);
    });
  }
  for (std::thread& thread : threads) thread.join();

  CHECK(torch::equal(losses[0], losses[1]));
  CHECK(torch::allclose(losses[0], whole));
  for (const auto& of_rank : gradients) {
    CHECK(torch::allclose(of_rank[0], right[0], 1e-5, 1e-7));
  }
  CHECK(torch::allclose(torch::cat({gradients[0][1], gradients[1][1]}), right[1], 1e-5, 1e-7));
}
