#include "cross_entropy.cuh"

#include <ATen/ops/empty.h>

#include <algorithm>
#include <bit>
#include <cmath>

#include "../ops/cross_entropy.h"
#include "cross_entropy_bad_target.h"
#include "cross_entropy_launch.h"
#include "dispatch.h"
#include "stream.h"

namespace ampfuse {

namespace {

// Returns the number of blocks that sum target weights. Each thread reads one target, since
// it would read several one after the other, as it does if there are more than kThreads² rows.
// There are at most kThreads blocks: each block of a later kernel reads all their results
// (reduction_scale).
int weight_blocks(int64_t rows) {
  return static_cast<int>(std::clamp<int64_t>((rows + kThreads - 1) / kThreads, 1, kThreads));
}

// Validates index targets and sums their weights, unless targets are probabilities or were
// validated before.
template <typename scalar_t>
CrossEntropyWorkspace launch_weigh(const LaunchStream& stream,
                                   const CrossEntropyArguments& arguments,
                                   const CrossEntropyTable<scalar_t>& table,
                                   const at::TensorOptions& doubles) {
  const bool is_needed = table.target != nullptr && !arguments.are_targets_checked;
  const CrossEntropyWorkspace workspace(is_needed ? weight_blocks(table.rows) : 0, doubles);
  if (is_needed) {  // the kernel sets `finished` to 0
    stream.launch(cross_entropy_weigh_kernel<scalar_t>, LaunchShape{workspace.weight_blocks()},
                  table, workspace.weights(), workspace.finished());
  } else if (!arguments.options.is_per_row()) {
    workspace.memory().zero_();
  }
  return workspace;
}

CrossEntropyReduction reduction_of(bool is_mean, const CrossEntropyWorkspace& workspace,
                                   const BadTargets& bad_targets, const at::Tensor& divisor) {
  return {nullptr,
          nullptr,
          workspace.weights(),
          workspace.weight_blocks(),
          is_mean,
          /*limit=*/INFINITY,
          nullptr,
          divisor.mutable_data_ptr<double>(),
          bad_targets.on_device(),
          bad_targets.trap()};
}

void weigh(const CrossEntropyArguments& arguments, const at::Tensor& total) {
  check_target_memory(arguments);
  const LaunchStream stream(total);
  BadTargets& bad_targets = bad_targets_of(total.device());
  bad_targets.raise_earlier();
  if (arguments.has_probabilities()) {  // each row counts as 1; do not convert them all to float
    total.fill_(static_cast<double>(arguments.rows().expect_int()));
    return;
  }
  dispatch_real(arguments.input.scalar_type(), [&]<typename scalar_t>() {
    at::Tensor converted;
    const auto table = table_of<scalar_t>(arguments, converted);
    const auto workspace = launch_weigh(stream, arguments, table, total.options());
    stream.launch(cross_entropy_total_kernel<scalar_t>, LaunchShape{.blocks = 1}, table,
                  reduction_of(/*is_mean=*/true, workspace, bad_targets, total));
  });
}

void forward(const CrossEntropyArguments& arguments, const std::optional<at::Tensor>& grad_scale,
             const std::optional<at::Tensor>& denominator, const CrossEntropyOutputs& outputs) {
  check_cross_entropy_memory(arguments);
  const at::Tensor& grad = outputs.grad;
  const at::Tensor& divisor = outputs.divisor;
  const at::Tensor& input = arguments.input;
  const int64_t rows = arguments.rows().expect_int();
  const LaunchStream stream(input);
  BadTargets& bad_targets = bad_targets_of(input.device());
  if (!arguments.are_targets_checked) bad_targets.raise_earlier();
  const bool is_per_row = arguments.options.is_per_row();
  const bool with_metrics = outputs.lse.numel() > 0;
  const bool with_grad = grad.numel() > 0;
  dispatch_real(input.scalar_type(), [&]<typename scalar_t>() {
    using acc_t = RowAcc<scalar_t>;
    at::Tensor converted;
    const auto table = table_of<scalar_t>(arguments, converted);
    const bool plain = is_plain(arguments) && !with_metrics;
    const bool has_positions = arguments.has_positions();
    const DeviceRoom room = device_room(stream);
    const auto launch = [&]<typename Team, RowWork kWork, typename logit_t = scalar_t>() {
      const auto [blocks, kept, shared] =
          row_launch<logit_t, Team, kWork>(room, rows, input.size(1), with_grad);
      const at::Tensor losses = at::empty({is_per_row ? 0 : blocks}, divisor.options());
      const auto workspace = launch_weigh(stream, arguments, table, divisor.options());
      CrossEntropyReduction reduction =
          reduction_of(arguments.options.is_mean(), workspace, bad_targets, divisor);
      if (grad_scale) reduction.grad_scale = grad_scale->const_data_ptr<float>();
      if (denominator) reduction.denominator = denominator->const_data_ptr<double>();
      reduction.limit = arguments.gradient_limit;
      reduction.baked_scale = outputs.baked_scale.mutable_data_ptr<float>();
      dispatch_gradient<logit_t, Team>(grad.scalar_type(), [&]<typename grad_t>() {
        auto* const loss = outputs.loss.mutable_data_ptr<acc_t>();
        const CrossEntropyResults<logit_t, grad_t> results = {
            .row_losses = is_per_row ? loss : nullptr,
            .reduced = {.loss = is_per_row ? nullptr : loss,
                        .of_blocks = losses.mutable_data_ptr<double>(),
                        .finished = workspace.finished()},
            .statistics =
                outputs.statistics.numel() == 0
                    ? nullptr
                    : static_cast<math::RowStatistics*>(outputs.statistics.mutable_data_ptr()),
            .grad = with_grad ? grad.mutable_data_ptr<grad_t>() : nullptr,
            .grad_at = with_grad ? rows_at(grad) : RowsAt{},
            .lse = with_metrics ? outputs.lse.mutable_data_ptr<acc_t>() : nullptr,
            .entropy = with_metrics ? outputs.entropy.mutable_data_ptr<acc_t>() : nullptr,
            .argmax = with_metrics ? outputs.argmax.mutable_data_ptr<int64_t>() : nullptr};
        stream.launch(cross_entropy_forward_kernel<logit_t, Team, kWork, grad_t>,
                      LaunchShape{blocks, Team::kBlock, shared},
                      std::bit_cast<CrossEntropyTable<logit_t>>(table), reduction, results, kept);
      });
    };
    if (has_positions) return for_positions(plain, launch);
    if constexpr (std::is_same_v<scalar_t, float>) {
      if (plain && grad.scalar_type() == at::kFloat && has_variant("quick_floats")) {
        return for_plain_rows<QuickFloat>(room, input.size(1), [&]<typename Team, RowWork kWork>() {
          launch.template operator()<Team, kWork, QuickFloat>();
        });
      }
    }
    for_forward_rows<scalar_t>(room, input.size(1), plain, launch);
  });
}

}  // namespace

constexpr CrossEntropyKernels kCrossEntropyCuda = {weigh, forward, cross_entropy_backward_cuda,
                                                   cross_entropy_rescale_cuda};

}  // namespace ampfuse
