#include "cross_entropy.cuh"

#include <algorithm>
#include <bit>
#include <cmath>

#include "cross_entropy_launch.cuh"

namespace ampfuse {

namespace {

// Returns the number of blocks that sum target weights. Each thread reads one target, since
// it would read several one after the other, as it does if there are more than kThreads² rows.
// There are at most kThreads blocks: each block of a later kernel reads all their results
// (reduction_scale).
int weight_blocks(int64_t rows) {
  return static_cast<int>(std::clamp<int64_t>((rows + kThreads - 1) / kThreads, 1, kThreads));
}

// Memory on the device through which blocks and kernels of a call pass numbers to others.
struct Workspace {
  // `loss_blocks`: number of blocks that sum losses. If targets are probabilities or were validated
  // before, no block sums target weights.
  Workspace(CudaCaller& caller, const LogitRows& rows, int loss_blocks) {
    if (rows.target != nullptr && !rows.are_targets_checked) blocks = weight_blocks(rows.rows);
    void* const memory = caller.allocate(sizeof(double) + blocks * sizeof(TargetWeight) +
                                         loss_blocks * sizeof(double));
    finished = static_cast<unsigned*>(memory);
    auto* const behind = reinterpret_cast<TargetWeight*>(static_cast<double*>(memory) + 1);
    weights = blocks == 0 ? nullptr : behind;
    losses = reinterpret_cast<double*>(behind + blocks);
  }

  int blocks = 0;         // that sum target weights
  unsigned* finished;     // the number of blocks that have finished
  TargetWeight* weights;  // one per block, or null
  double* losses;         // one per block
};

// Validates index targets and sums their weights, unless that is not needed.
template <typename scalar_t>
void launch_weigh(const LaunchStream& stream, const CrossEntropyTable<scalar_t>& table,
                  const Workspace& workspace, bool counts_blocks) {
  if (workspace.blocks > 0) {  // the kernel sets `finished` to 0
    stream.launch(cross_entropy_weigh_kernel<scalar_t>, LaunchShape{workspace.blocks}, table,
                  workspace.weights, workspace.finished);
  } else if (counts_blocks) {
    stream.clear(workspace.finished, sizeof(unsigned));
  }
}

CrossEntropyReduction reduction_of(bool is_mean, const Workspace& workspace, const LogitRows& rows,
                                   double* divisor) {
  return {nullptr,
          nullptr,
          workspace.weights,
          workspace.blocks,
          is_mean,
          /*limit=*/INFINITY,
          nullptr,
          divisor,
          rows.bad_target,
          rows.trap};
}

}  // namespace

void launch_cross_entropy_weigh(CudaCaller& caller, const LogitRows& rows, double* total) {
  const LaunchStream stream(caller);
  const Workspace workspace(caller, rows, /*loss_blocks=*/0);
  dispatch_real(rows.dtype, [&]<typename scalar_t>() {
    const auto table = table_of<scalar_t>(rows);
    launch_weigh(stream, table, workspace, /*counts_blocks=*/false);
    stream.launch(cross_entropy_total_kernel<scalar_t>, LaunchShape{.blocks = 1}, table,
                  reduction_of(/*is_mean=*/true, workspace, rows, total));
  });
}

void launch_cross_entropy_forward(CudaCaller& caller, const LogitRows& rows,
                                  const ForwardPointers& pointers) {
  const LaunchStream stream(caller);
  const bool with_grad = pointers.grad != nullptr;
  const bool plain = is_plain(rows) && pointers.lse == nullptr;
  const DeviceRoom room = device_room(stream);
  dispatch_real(rows.dtype, [&]<typename scalar_t>() {
    using acc_t = RowAcc<scalar_t>;
    const auto table = table_of<scalar_t>(rows);
    const auto launch = [&]<typename Team, RowWork kWork, typename logit_t = scalar_t>() {
      const auto [blocks, kept, shared] =
          row_launch<logit_t, Team, kWork>(room, rows.rows, rows.classes, with_grad);
      const Workspace workspace(caller, rows, pointers.is_per_row ? 0 : blocks);
      launch_weigh(stream, table, workspace, /*counts_blocks=*/!pointers.is_per_row);
      CrossEntropyReduction reduction =
          reduction_of(pointers.is_mean, workspace, rows, pointers.divisor);
      reduction.grad_scale = pointers.grad_scale;
      reduction.denominator = pointers.denominator;
      reduction.limit = pointers.gradient_limit;
      reduction.baked_scale = pointers.baked_scale;
      dispatch_gradient<logit_t, Team>(pointers.grad_dtype, [&]<typename grad_t>() {
        auto* const loss = static_cast<acc_t*>(pointers.loss);
        const CrossEntropyResults<logit_t, grad_t> results = {
            .row_losses = pointers.is_per_row ? loss : nullptr,
            .reduced = {.loss = pointers.is_per_row ? nullptr : loss,
                        .of_blocks = workspace.losses,
                        .finished = workspace.finished},
            .statistics = pointers.statistics,
            .grad = static_cast<grad_t*>(pointers.grad),
            .grad_at = pointers.grad_at,
            .lse = static_cast<acc_t*>(pointers.lse),
            .entropy = static_cast<acc_t*>(pointers.entropy),
            .argmax = pointers.argmax};
        stream.launch(cross_entropy_forward_kernel<logit_t, Team, kWork, grad_t>,
                      LaunchShape{blocks, Team::kBlock, shared},
                      std::bit_cast<CrossEntropyTable<logit_t>>(table), reduction, results, kept);
      });
    };
    if (rows.are_positions) return for_positions(plain, launch);
    if constexpr (std::is_same_v<scalar_t, float>) {
      if (plain && pointers.grad_dtype == c10::ScalarType::Float && has_variant("quick_floats")) {
        return for_plain_rows<QuickFloat>(room, rows.classes, [&]<typename Team, RowWork kWork>() {
          launch.template operator()<Team, kWork, QuickFloat>();
        });
      }
    }
    for_forward_rows<scalar_t>(room, rows.classes, plain, launch);
  });
}

}  // namespace ampfuse
