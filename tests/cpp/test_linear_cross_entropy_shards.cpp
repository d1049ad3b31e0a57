// ampfuse::linear_cross_entropy on two threads that act as ranks: each has the weight of a shard of
// the vocabulary. tests/python/losses/test_linear_cross_entropy_shards.py compares values with
// float64.
#include <ampfuse/ampfuse.h>
#include <torch/torch.h>
#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/GroupRegistry.hpp>

#include <barrier>
#include <thread>

#include "torch_catch.h"

namespace {

constexpr int kSize = 2;

// Memory through which the threads of a group exchange tensors.
struct Table {
  std::barrier<> barrier{kSize};
  std::array<at::Tensor, kSize> of_rank;

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
  Threads(Table& table, int rank) : Backend(rank, kSize), table_(table) {}

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

// The process group of one rank, registered under name() for the lifetime of this object.
class Member {
 public:
  Member(Table& table, int rank)
      : name_("member " + std::to_string(rank)),
        group_(c10::make_intrusive<c10d::ProcessGroup>(rank, kSize)) {
    group_->setBackend(c10::kCPU, c10d::ProcessGroup::CUSTOM,
                       c10::make_intrusive<Threads>(table, rank));
    c10d::register_process_group(name_, group_);
  }
  ~Member() { c10d::unregister_process_group(name_); }

  const std::string& name() const { return name_; }

 private:
  std::string name_;
  c10::intrusive_ptr<c10d::ProcessGroup> group_;
};

}  // namespace

TEST_CASE("vocabulary shards give the loss and gradients of the whole vocabulary") {
  torch::manual_seed(2);
  const int64_t middle = 23;
  const int64_t classes = 40;
  const auto hidden = torch::randn({9, 6}).requires_grad_();
  const auto weight = torch::randn({classes, 6}).requires_grad_();
  auto target = torch::randint(classes, {9}, torch::kLong);
  target.slice(0, 0, 9, 3).fill_(-100);
  const auto options = ampfuse::LinearCrossEntropyOptions().label_smoothing(0.1).chunk_rows(4);
  const auto whole = ampfuse::linear_cross_entropy(hidden, weight, target, {}, options);
  const auto right = torch::autograd::grad({whole}, {hidden, weight});

  Table table;
  std::array<at::Tensor, kSize> losses;
  std::array<at::Tensor, kSize> of_hidden;
  std::array<at::Tensor, kSize> of_weight;
  std::vector<std::thread> threads;
  for (int rank = 0; rank < kSize; ++rank) {
    threads.emplace_back([&, rank] {
      const Member member(table, rank);
      const int64_t first = rank == 0 ? 0 : middle;
      const auto here = hidden.detach().requires_grad_();
      const auto mine =
          weight.detach().slice(0, first, rank == 0 ? middle : classes).clone().requires_grad_();
      auto shared = options;
      shared.shard(ampfuse::VocabShard{member.name(), kSize, first, classes});
      losses[rank] = ampfuse::linear_cross_entropy(here, mine, target, {}, shared);
      const auto gradients = torch::autograd::grad({losses[rank]}, {here, mine});
      of_hidden[rank] = gradients[0];
      of_weight[rank] = gradients[1];
    });
  }
  for (std::thread& thread : threads) thread.join();

  CHECK(torch::equal(losses[0], losses[1]));
  CHECK(torch::allclose(losses[0], whole));
  for (const at::Tensor& gradient : of_hidden) {
    CHECK(torch::allclose(gradient, right[0], 1e-5, 1e-7));
  }
  CHECK(torch::allclose(torch::cat({of_weight[0], of_weight[1]}), right[1], 1e-5, 1e-7));
}
