// The kernels of cross_entropy's forward pass, compiled for the teams and types with which the
// library launches them (csrc/cuda/cross_entropy_teams.cuh).
#include "cross_entropy_on_host.h"

#include "cuda/cross_entropy.cuh"

#include <stdexcept>

using ampfuse::RowWork;
using c10::BFloat16;
using c10::Half;

namespace {

using ampfuse::BlockTeam;
using ampfuse::LaneTeam;
using ampfuse::PositionTeam;
using Few = LaneTeam<8>;
using Warp = ampfuse::WarpTeam;
using Block = BlockTeam<256>;
using Wide = BlockTeam<512>;
using Widest = BlockTeam<1024>;

template <typename scalar_t, typename grad_t, typename RowTeam, RowWork kWork>
void launch(Batch& batch) {
  using acc_t = ampfuse::RowAcc<scalar_t>;
  const Options& options = batch.options;
  const auto unless = [&](Result result, auto* data) {
    return options.without == result ? nullptr : data;
  };
  const auto if_metrics = [&](auto* data) { return options.metrics ? data : nullptr; };
  const ampfuse::CrossEntropyResults<scalar_t, grad_t> results = {
      unless(Result::kRowLosses, batch.losses.at<acc_t>()),
      {unless(Result::kLoss, batch.loss.at<acc_t>()), batch.block_losses.data(), &batch.finished},
      unless(Result::kStatistics, batch.statistics.data()),
      unless(Result::kGrad, batch.gradient().at<grad_t>()),
      batch.rows_at(batch.gradient_stride()),
      if_metrics(batch.lse.at<acc_t>()),
      if_metrics(batch.entropy.at<acc_t>()),
      if_metrics(batch.argmax.data())};
  int pieces = 1;
  if constexpr (is_held(kWork)) {
    using Row = ampfuse::HeldRow<kWork, scalar_t, RowTeam>;
    static_assert(Row::kMostClasses == most_held(Team{RowTeam::kSize}, kWork));
    pieces = Row::kPacks;
  }
  const int kept = options.kept_pieces.value_or(pieces) * RowTeam::kSize;
  simt::launch(ampfuse::cross_entropy_forward_kernel<scalar_t, RowTeam, kWork, grad_t>, kGrid,
               RowTeam::kBlock, kept * RowTeam::kTeams * sizeof(ampfuse::Pack<scalar_t>),
               batch.table<scalar_t>(), batch.reduction(), results, kept);
}

RowWork work_of(const Batch& batch, Team team) {
  if (batch.options.work) return *batch.options.work;
  if (!batch.options.is_plain()) return RowWork::kGeneral;
  const bool is_held =
      size_of(batch.type) == 2 && team != Team::kPosition && batch.classes <= most_held(team);
  return is_held ? RowWork::kHeld : RowWork::kPlain;
}

}  // namespace

void weigh(Batch& batch) {
  const auto run = [&]<typename scalar_t>() {
    simt::launch(ampfuse::cross_entropy_weigh_kernel<scalar_t>, batch.weights.size(),
                 ampfuse::kThreads, 0, batch.table<scalar_t>(), batch.weights.data(),
                 &batch.finished);
  };
  batch.type == kBFloat16 ? run.operator()<BFloat16>() : run.operator()<float>();
}

void forward(Batch& batch, Team team) {
  constexpr auto kPlain = RowWork::kPlain;
  constexpr auto kGeneral = RowWork::kGeneral;
  constexpr auto kHeld = RowWork::kHeld;
  const Chosen it = {batch.type, batch.grad.type, work_of(batch, team), team};
  const auto run = [&]<typename scalar_t, typename grad_t, typename RowTeam, RowWork kWork>() {
    launch<scalar_t, grad_t, RowTeam, kWork>(batch);
  };
  if (batch.options.quick_ulps > 0) {
    if (team == Team::kWarp) return launch<ampfuse::QuickFloat, float, Warp, kPlain>(batch);
    return launch<ampfuse::QuickFloat, float, Block, kPlain>(batch);
  }
  const bool is_known =
      is_launched<Half, Half, kHeld, Few, Warp, BlockTeam<64>, Block>(it, run) ||
      is_launched<Half, Half, kPlain, PositionTeam, Wide, Widest>(it, run) ||
      is_launched<Half, Half, kGeneral, Warp>(it, run) ||
      is_launched<BFloat16, BFloat16, kHeld, Few, Warp, BlockTeam<64>, BlockTeam<128>, Block, Wide>(
          it, run) ||
      is_launched<BFloat16, BFloat16, RowWork::kHeldTwice, LaneTeam<16>, BlockTeam<64>>(it, run) ||
      is_launched<BFloat16, BFloat16, kPlain, PositionTeam, Wide, Widest>(it, run) ||
      is_launched<BFloat16, BFloat16, kGeneral, PositionTeam, Warp, Block, Wide>(it, run) ||
      is_launched<float, float, kPlain, PositionTeam, Few, Warp, Block, Wide, Widest>(it, run) ||
      is_launched<float, float, kGeneral, PositionTeam, Warp, Block, Wide>(it, run) ||
      is_launched<float, BFloat16, kPlain, Few, Warp, Block, Wide, Widest>(it, run) ||
      is_launched<float, BFloat16, kGeneral, Warp>(it, run) ||
      is_launched<float, Half, kPlain, Few, Warp, Block, Wide, Widest>(it, run) ||
      is_launched<float, Half, kGeneral, Block>(it, run) ||
      is_launched<double, double, kPlain, PositionTeam, Warp, Block>(it, run) ||
      is_launched<double, double, kGeneral, PositionTeam, Warp, Block>(it, run);
  if (!is_known) throw std::invalid_argument("forward: this kernel was not compiled");
}
