#include <ATen/Parallel.h>

#include <vector>

#include "../ops/cross_entropy_kernels.h"
#include "../ops/registration.h"
#include "cross_entropy_passes.h"
#include "fresh_memory.h"
#include "vec/multi_tensor_scale.h"

namespace ampfuse {

namespace {

// Throws if a target is out of range. Returns the total weight of the targets, added in an order
// that does not depend on the number of threads, or with probabilities the number of rows.
double checked_target_weight(const CpuRows& rows) {
  if (rows.has_probabilities()) return static_cast<double>(rows.count());
  constexpr int64_t kRows = 16384;
  const int64_t blocks = (rows.count() + kRows - 1) / kRows;
  std::vector<CpuRows::TargetWeight> weights(static_cast<size_t>(blocks));
  at::parallel_for(0, blocks, 1, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) {
      const int64_t first = block * kRows;
      weights[block] = rows.weigh_targets(first, std::min(first + kRows, rows.count()));
    }
  });
  double total = 0;
  for (const CpuRows::TargetWeight& some : weights) {
    TORCH_CHECK_INDEX(some.bad_row < 0, "Target ", rows.target(some.bad_row),
                      " is out of bounds: in row ", some.bad_row, ", expected a class in [0, ",
                      rows.classes(), "), or ignore_index if the row is padding");
    total += some.weight;
  }
  return total;
}

void weigh(const CrossEntropyArguments& arguments, const at::Tensor& total) {
  check_target_memory(arguments);
  *total.mutable_data_ptr<double>() = checked_target_weight(CpuRows(arguments));
}

void forward(const CrossEntropyArguments& arguments, const std::optional<at::Tensor>& grad_scale,
             const std::optional<at::Tensor>& denominator, const CrossEntropyOutputs& outputs) {
  const at::Tensor& grad = outputs.grad;
  const at::Tensor& statistics = outputs.statistics;
  check_cross_entropy_memory(arguments);
  const CpuRows rows(arguments);
  const double weight = arguments.are_targets_checked ? 0 : checked_target_weight(rows);
  const bool is_mean = arguments.options.is_mean();
  const double divisor = !is_mean      ? 1
                         : denominator ? *denominator->const_data_ptr<double>()
                                       : weight;
  const float scale = grad_scale ? math::baked_scale(*grad_scale->const_data_ptr<float>(), divisor,
                                                     arguments.gradient_limit)
                                 : 1;
  const bool is_per_row = arguments.options.is_per_row();
  const bool with_grad = grad.numel() > 0;
  if (with_grad && !grad.is_alias_of(arguments.input)) prepare_fresh_memory(grad);
  const int64_t summands = rows.are_tiled() ? rows.tiles() : rows.count();
  std::vector<double> losses(static_cast<size_t>(is_per_row ? 0 : summands));
  const ForwardResults results = {
      is_per_row,
      NumberWriter(outputs.loss),
      losses.data(),
      statistics.numel() == 0 ? nullptr
                              : static_cast<math::RowStatistics*>(statistics.mutable_data_ptr()),
      with_grad ? RowWriter(grad) : RowWriter(),
      outputs.lse.numel() > 0,
      NumberWriter(outputs.lse),
      NumberWriter(outputs.entropy),
      outputs.argmax.mutable_data_ptr<int64_t>()};
  rows.are_tiled() ? forward_by_tile(rows, scale / divisor, results)
                   : forward_by_row(rows, scale / divisor, results);
  *outputs.baked_scale.mutable_data_ptr<float>() = scale;
  *outputs.divisor.mutable_data_ptr<double>() = divisor;
  if (is_per_row) return;
  double total = 0;
  for (const double some : losses) total += some;
  NumberWriter(outputs.loss).put(0, math::reduced_loss(total, divisor));
}

void backward(const CrossEntropyArguments& arguments, const at::Tensor& grad_output,
              const at::Tensor& statistics, const at::Tensor& divisor, const at::Tensor& grad) {
  check_cross_entropy_memory(arguments);
  const CpuRows rows(arguments);
  if (!arguments.are_targets_checked) checked_target_weight(rows);
  if (!grad.is_alias_of(arguments.input)) prepare_fresh_memory(grad);
  const BackwardInputs inputs = {
      static_cast<const math::RowStatistics*>(statistics.const_data_ptr()),
      grad_output.const_data_ptr<double>(), grad_output.dim() == 1,
      *divisor.const_data_ptr<double>()};
  rows.are_tiled() ? backward_by_tile(rows, inputs, RowWriter(grad))
                   : backward_by_row(rows, inputs, RowWriter(grad));
}

void rescale(const at::Tensor& grad, const at::Tensor& baked_scale, const at::Tensor& grad_output) {
  const double baked = *baked_scale.const_data_ptr<float>();
  const double wanted = grad_output.item<double>();
  if (wanted == baked) return;
  const auto scale_chunk = AMPFUSE_CHOOSE(scale_chunk);
  const auto scale = [&](void* data, int64_t count) {
    scale_chunk(grad.scalar_type(), data, count, wanted / baked);
  };
  auto* const data = static_cast<char*>(grad.mutable_data_ptr());
  const int64_t item = grad.itemsize();
  if (grad.is_contiguous()) {
    at::parallel_for(0, grad.numel(), 16384,
                     [&](int64_t begin, int64_t end) { scale(data + begin * item, end - begin); });
    return;
  }
  at::parallel_for(0, grad.size(0), worth_a_thread(grad.size(1)), [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      scale(data + row * grad.stride(0) * item, grad.size(1));
    }
  });
}

}  // namespace

constexpr CrossEntropyKernels kCrossEntropyCpu = {weigh, forward, backward, rescale,
                                                  /*narrows_in_place=*/true};

AMPFUSE_KERNELS(CPU, m) {
  register_cross_entropy<kCrossEntropyCpu>(m);
}

}  // namespace ampfuse
