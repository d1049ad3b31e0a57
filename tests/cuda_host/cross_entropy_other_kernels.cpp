// Kernels of cross_entropy besides those of forward: backward, totals, and vocabulary shards.
#include "cross_entropy_on_host.h"

#include "cuda/cross_entropy.cuh"
#include "cuda/cross_entropy_backward.cuh"
#include "cuda/cross_entropy_shards.cuh"

#include <stdexcept>

using ampfuse::PositionTeam;
using ampfuse::RowWork;
using c10::BFloat16;

namespace {

using Warp = ampfuse::WarpTeam;
using Block = ampfuse::BlockTeam<256>;
constexpr auto kPlain = RowWork::kPlain;
constexpr auto kGeneral = RowWork::kGeneral;

Chosen chosen(const Batch& batch, Team team) {
  return {batch.type, batch.grad.type, batch.options.is_plain() ? kPlain : kGeneral, team};
}

template <typename scalar_t>
ampfuse::CrossEntropyTable<scalar_t> table_of(Batch& batch, const Shard* shard) {
  auto table = batch.table<scalar_t>();
  if (shard == nullptr) return table;
  table.input += shard->first;
  table.classes = shard->classes;
  if (table.target != nullptr) table.target = shard->targets.data();
  table.ignore_index = -1;
  if (table.weight != nullptr) table.weight += shard->first;
  if (table.probabilities != nullptr) table.probabilities += shard->first;
  table.is_shard = true;
  return table;
}

// Launches a kernel of shards, which are tested with float and double logits.
template <typename Launch>
void launch_for_shards(const Chosen& it, const Launch& run) {
  const bool is_known = is_launched<float, float, kPlain, Warp, Block>(it, run) ||
                        is_launched<float, float, kGeneral, Warp, Block>(it, run) ||
                        is_launched<double, double, kPlain, Warp, Block>(it, run) ||
                        is_launched<double, double, kGeneral, Warp, Block>(it, run);
  if (!is_known) throw std::invalid_argument("this kernel was not compiled");
}

}  // namespace

void backward(Batch& batch, Team team, const Numbers& grad, const Shard* shard) {
  const double upstream = batch.baked;
  const auto run = [&]<typename scalar_t, typename grad_t, typename RowTeam, RowWork kWork>() {
    simt::launch(ampfuse::cross_entropy_backward_kernel<scalar_t, RowTeam, kWork, grad_t>, kGrid,
                 RowTeam::kBlock, 0, table_of<scalar_t>(batch, shard), batch.statistics.data(),
                 &batch.divisor, &upstream, false, grad.at<grad_t>(shard ? shard->first : 0),
                 batch.rows_at(batch.classes));
  };
  const Chosen it = chosen(batch, team);
  const bool is_launched_once =
      is_launched<BFloat16, BFloat16, kPlain, PositionTeam, Warp, Block>(it, run) ||
      is_launched<BFloat16, BFloat16, kGeneral, Block>(it, run) ||
      is_launched<float, BFloat16, kPlain, Warp>(it, run) ||
      is_launched<float, float, kPlain, PositionTeam>(it, run);
  if (!is_launched_once) launch_for_shards(it, run);
}

void reduce_shard(Batch& batch, Team team, const Shard& shard,
                  ampfuse::math::ShardPartial* partials, int64_t* argmax) {
  const auto run = [&]<typename scalar_t, typename, typename RowTeam, RowWork kWork>() {
    simt::launch(ampfuse::cross_entropy_shards_reduce_kernel<scalar_t, RowTeam, kWork>, kGrid,
                 RowTeam::kBlock, 0, table_of<scalar_t>(batch, &shard), partials, argmax);
  };
  launch_for_shards(chosen(batch, team), run);
}

void join_shards(Batch& batch, const Shard& shard, const ampfuse::math::ShardPartial* partials,
                 int shards, int64_t all_classes, double* losses) {
  const auto run = [&]<typename scalar_t>() {
    using acc_t = ampfuse::RowAcc<scalar_t>;
    ampfuse::JoinedResults<acc_t> results = {};
    results.loss = losses;
    results.statistics = batch.statistics.data();
    if (batch.options.metrics) {
      results.lse = batch.lse.at<acc_t>();
      results.entropy = batch.entropy.at<acc_t>();
      results.argmax = batch.argmax.data();
    }
    simt::launch(ampfuse::cross_entropy_shards_join_kernel<scalar_t>, kGrid, ampfuse::kThreads, 0,
                 table_of<scalar_t>(batch, &shard), partials, shards, all_classes, results);
  };
  batch.type == kFloat ? run.operator()<float>() : run.operator()<double>();
}

void total(Batch& batch) {
  simt::launch(ampfuse::cross_entropy_total_kernel<float>, 1, ampfuse::kThreads, 0,
               batch.table<float>(), batch.reduction());
}

void rescale(const Numbers& grad, int count, float baked, float upstream) {
  simt::launch(ampfuse::cross_entropy_rescale_kernel<BFloat16>, 2, ampfuse::kThreads, 0,
               grad.at<BFloat16>(), int64_t(count), grad.size, count, &baked, &upstream);
}
