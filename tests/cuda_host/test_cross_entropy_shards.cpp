// Rows whose classes are divided into vocabulary shards: the kernels for one shard, and for joining
// the results of all shards.
#include "simt/simt.h"

#include "cross_entropy_exact.h"
#include "cuda/cross_entropy_shards.cuh"

#include "catch.h"

using ampfuse::RowWork;

namespace {

// The classes from `first` to `last`, excluding `last`, of all rows of a batch.
template <typename scalar_t>
struct Shard {
  int first;
  int classes;
  std::vector<int64_t> targets;

  Shard(const Batch<scalar_t>& batch, int first, int last) : first(first), classes(last - first) {
    for (const int64_t target : batch.targets) {
      const bool is_here = target >= first && target < last;
      const int64_t here = is_here ? target - first : ampfuse::math::kElsewhere;
      targets.push_back(target == batch.options.ignore_index() ? -1 : here);
    }
  }

  ampfuse::CrossEntropyTable<scalar_t> table(Batch<scalar_t>& batch) const {
    auto table = batch.table();
    table.input += first;
    table.classes = classes;
    if (table.target != nullptr) table.target = targets.data();
    table.ignore_index = -1;
    if (table.weight != nullptr) table.weight += first;
    if (table.probabilities != nullptr) table.probabilities += first;
    table.is_shard = true;
    return table;
  }
};

// Replaces the results of forward with the joined results of two shards.
template <typename scalar_t, typename Team, RowWork kWork>
void by_shards(Batch<scalar_t>& batch, int middle, int64_t all_classes) {
  const std::vector<Shard<scalar_t>> shards = {{batch, 0, middle}, {batch, middle, batch.classes}};
  const bool with_metrics = batch.options.metrics;
  std::vector<ampfuse::math::ShardPartial> partials(2 * batch.rows);
  std::vector<int64_t> argmax(batch.rows);
  for (size_t i = 0; i < shards.size(); ++i) {
    auto* const mine = partials.data() + i * batch.rows;
    simt::launch(ampfuse::cross_entropy_shards_reduce_kernel<scalar_t, Team, kWork>, kGrid,
                 Team::kBlock, 0, shards[i].table(batch), mine,
                 with_metrics ? argmax.data() : nullptr);
    for (int64_t row = 0; row < batch.rows && with_metrics; ++row) {
      mine[row].argmax = static_cast<double>(argmax[row] + shards[i].first);
    }
  }
  std::vector<double> losses(batch.rows, NAN);
  const double upstream = batch.baked;
  std::fill_n(batch.grad.data(), batch.grad.size, as_element<scalar_t>(NAN));
  for (const Shard<scalar_t>& shard : shards) {
    const ampfuse::JoinedResults<ampfuse::RowAcc<scalar_t>> results = {
        losses.data(), batch.statistics.data(), with_metrics ? batch.lse.data() : nullptr,
        with_metrics ? batch.entropy.data() : nullptr,
        with_metrics ? batch.argmax.data() : nullptr};
    simt::launch(ampfuse::cross_entropy_shards_join_kernel<scalar_t>, kGrid, ampfuse::kThreads, 0,
                 shard.table(batch), partials.data(), 2, all_classes, results);
    simt::launch(ampfuse::cross_entropy_backward_kernel<scalar_t, Team, kWork, scalar_t>, kGrid,
                 Team::kBlock, 0, shard.table(batch), batch.statistics.data(), &batch.divisor,
                 &upstream, false, batch.grad.data() + shard.first, batch.rows_at(batch.classes));
  }
  double total = 0;
  for (int64_t row = 0; row < batch.rows; ++row) {
    batch.losses[row] = static_cast<ampfuse::RowAcc<scalar_t>>(losses[row]);
    total += losses[row];
  }
  batch.loss = static_cast<ampfuse::RowAcc<scalar_t>>(total / batch.divisor);
}

template <typename scalar_t, typename Team>
void check_shards(int64_t rows, int classes, int middle, const Options& options) {
  CAPTURE(rows, classes, middle, sizeof(scalar_t));
  Batch<scalar_t> batch(rows, classes, 0, options);
  const std::vector<scalar_t> logits = batch.dense_logits();
  if (options.is_plain()) {
    forward_on_host<scalar_t, Team, RowWork::kPlain>(batch);
    by_shards<scalar_t, Team, RowWork::kPlain>(batch, middle, classes);
  } else {
    forward_on_host<scalar_t, Team, RowWork::kGeneral>(batch);
    by_shards<scalar_t, Team, RowWork::kGeneral>(batch, middle, classes);
  }
  check(batch, logits);
}

}  // namespace

TEMPLATE_TEST_CASE("two vocabulary shards give the results of the whole vocabulary", "", float,
                   double) {
  simt::for_each_schedule([] {
    INFO(simt::schedule().name());
    check_shards<TestType, WarpTeam>(9, 301, 128, {});
    check_shards<TestType, BlockTeam>(4, 2051, 1030, {});
  });
  for (const Options& options : each_by_itself({})) {
    check_shards<TestType, WarpTeam>(9, 301, 100, options);
    check_shards<TestType, BlockTeam>(4, 2051, 1030, options);
  }
}

TEST_CASE("a shard may hold one class") {
  check_shards<float, WarpTeam>(9, 30, 1, {});
  check_shards<float, WarpTeam>(9, 30, 29, {});
}

// Checks rows to which the first shard adds nothing: its logits are far below the others, or −∞.
template <RowWork kWork>
void check_empty_shard() {
  Options options;
  options.metrics = kWork == RowWork::kGeneral;
  Batch<float> batch(8, 64, 0, options);
  for (int64_t row = 0; row < 8; ++row) {
    for (int c = 0; c < 32; ++c) batch.logit(row, c) = row < 4 ? -3e4f : -HUGE_VALF;
    if (batch.targets[row] != kIgnored) batch.targets[row] = 40 + row;
  }
  const std::vector<float> logits = batch.dense_logits();
  forward_on_host<float, WarpTeam, kWork>(batch);
  const std::vector<float> losses = batch.losses;
  by_shards<float, WarpTeam, kWork>(batch, 32, 64);
  for (int64_t row = 0; row < 8; ++row) {
    CHECK(std::fabs(batch.losses[row] - losses[row]) <= 1e-6f * losses[row]);
    for (int c = 0; c < 32; ++c) CHECK(batch.gradient_of(row, c) == 0);
  }
}

TEST_CASE("all logits of a shard may be far below those of the others, or -inf") {
  check_empty_shard<RowWork::kPlain>();
  check_empty_shard<RowWork::kGeneral>();
}

TEST_CASE("a target that no shard holds makes its row NaN") {
  Batch<float> batch(2, 40, 0, {});
  batch.targets = {5, 30};
  forward_on_host<float, WarpTeam, RowWork::kPlain>(batch);
  batch.targets = {5, 40};
  by_shards<float, WarpTeam, RowWork::kPlain>(batch, 20, 40);
  CHECK(std::isfinite(batch.losses[0]));
  CHECK(std::isnan(batch.losses[1]));
}

TEST_CASE("rows are NaN if the shards do not cover all classes") {
  Batch<float> batch(8, 40, 0, {});
  forward_on_host<float, WarpTeam, RowWork::kPlain>(batch);
  by_shards<float, WarpTeam, RowWork::kPlain>(batch, 20, 41);
  for (int64_t row = 0; row < 8; ++row) {
    CHECK(std::isnan(batch.losses[row]) == (batch.targets[row] != kIgnored));
  }
}
