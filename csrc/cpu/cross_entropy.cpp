// A thread takes rows, or where rows are fewer than threads the blocks of one row: results are
// joined in the order of blocks either way, so that nothing depends on how many threads there are.
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <cmath>

#include "../ops/cross_entropy_kernels.h"
#include "cross_entropy_rows.h"
#include "fresh_memory.h"
#include "vec/multi_tensor_scale.h"

namespace ampfuse {

namespace {

using RowPart = math::RowPart<double>;

// Refuses targets that are no classes; what they weigh together.
double check_targets(const CpuRows& rows, const CrossEntropyArguments& arguments) {
  if (arguments.has_probabilities()) return static_cast<double>(rows.count());
  double total = 0;
  for (int64_t row = 0; row < rows.count(); ++row) {
    if (rows.is_ignored(row)) continue;
    const int64_t target = rows.target(row);
    TORCH_CHECK_INDEX(target >= 0 && target < rows.classes(), "cross_entropy: Target ", target,
                      " is out of bounds. It is row ", row, "'s, and there are ", rows.classes(),
                      " classes");
    total += rows.weight(target);
  }
  return total;
}

// Calls visit(block) for each: on threads of its own, or on this one.
template <typename Visit>
void each_block(int64_t blocks, bool in_parallel, const Visit& visit) {
  const auto some = [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) visit(block);
  };
  in_parallel ? at::parallel_for(0, blocks, 1, some) : some(0, blocks);
}

// Calls visit(row, whether its blocks are for several threads, `scratch` bytes) for each row.
template <typename Visit>
void each_row(const CpuRows& rows, int64_t scratch, const Visit& visit) {
  c10::Allocator* const allocator = c10::GetCPUAllocator();
  if (rows.count() < at::get_num_threads() && rows.blocks() > 1) {
    const c10::DataPtr memory = allocator->allocate(scratch);
    for (int64_t row = 0; row < rows.count(); ++row) visit(row, true, memory.get());
    return;
  }
  const int64_t worth_a_thread = std::max<int64_t>(1, 16384 / std::max<int64_t>(1, rows.classes()));
  at::parallel_for(0, rows.count(), worth_a_thread, [&](int64_t begin, int64_t end) {
    const c10::DataPtr memory = allocator->allocate(scratch);
    for (int64_t row = begin; row < end; ++row) visit(row, false, memory.get());
  });
}

// What a call writes.
struct Written {
  double* losses;                   // of rows, before they are reduced
  math::RowStatistics* statistics;  // or null
  RowWriter grad;
  bool with_metrics;
  NumberWriter lse;
  NumberWriter entropy;
  int64_t* argmax;
};

// The class of the first largest logit of a row; a NaN is larger than all numbers, as in torch.
int64_t first_largest(const CpuRows& rows, int64_t row) {
  int64_t largest = 0;
  for (int64_t c = 1; c < rows.classes(); ++c) {
    const double x = rows.logit(row, c);
    const double best = rows.logit(row, largest);
    if (x > best || (std::isnan(x) && !std::isnan(best))) largest = c;
  }
  return largest;
}

// `scratch`: of what a row's blocks tell, then of its exponentials.
void forward_row(const CpuRows& rows, const Written& written, double grad_factor, int64_t row,
                 bool in_parallel, void* scratch) {
  const int64_t blocks = rows.blocks();
  const bool is_ignored = rows.is_ignored(row);
  if (is_ignored) {
    written.losses[row] = 0;
    if (written.statistics != nullptr) written.statistics[row] = {};
    if (written.grad.is_wanted()) written.grad.zero(row);
    if (!written.with_metrics) return;
  }
  auto* const parts = static_cast<RowPart*>(scratch);
  auto* const exponentials = static_cast<char*>(scratch) + rows.parts_bytes();
  const auto part = AMPFUSE_CHOOSE(row_part);
  each_block(blocks, in_parallel, [&](int64_t block) {
    parts[block] = part(rows.logits(row, block), rows.shares(row, block), written.with_metrics,
                        exponentials + rows.exponentials_bytes(block));
  });
  RowPart whole;
  for (int64_t block = 0; block < blocks; ++block) whole = math::join(whole, parts[block]);
  const math::RowTarget<double> target = rows.row_target(row);
  const math::RowLoss<double> loss = math::row_loss(whole, target, rows.z_loss());
  if (written.with_metrics) {
    written.lse.put(row, loss.lse);
    written.entropy.put(row, loss.entropy);
    written.argmax[row] = first_largest(rows, row);
  }
  if (is_ignored) return;
  written.losses[row] = loss.loss;
  if (written.statistics != nullptr) written.statistics[row] = loss.statistics;
  if (!written.grad.is_wanted()) return;
  const math::RowGradient<double> of_row = math::row_gradient(
      loss.statistics, whole.reference, target.share, rows.z_loss(), grad_factor);
  const auto gradient = AMPFUSE_CHOOSE(row_gradient);
  each_block(blocks, in_parallel, [&](int64_t block) {
    // Exponentials are relative to their block's reference. Of nothing but -infinity, they are 0.
    const bool is_nothing = parts[block].largest == math::minus_infinity<double>();
    const double below = is_nothing ? 0 : whole.reference - parts[block].reference;
    math::RowGradient<double> of_block = of_row;
    if (below != 0) of_block.of_exponential *= std::exp(-below);
    gradient(rows.logits(row, block), rows.shares(row, block),
             exponentials + rows.exponentials_bytes(block), of_block,
             written.grad.at(row, block * kClassBlock));
  });
}

void forward(const CrossEntropyArguments& arguments, const std::optional<at::Tensor>& grad_scale,
             const std::optional<at::Tensor>& denominator, const CrossEntropyOutputs& outputs) {
  const auto& [loss, grad, baked, statistics, divisor, lse, entropy, argmax] = outputs;
  check_cross_entropy_memory(arguments);
  const CpuRows rows(arguments);
  const double weight = check_targets(rows, arguments);
  const bool is_mean = arguments.reduction == at::Reduction::Mean;
  const double divide_by = !is_mean      ? 1
                           : denominator ? *denominator->const_data_ptr<double>()
                                         : weight;
  const float scale = grad_scale ? math::baked_scale(*grad_scale->const_data_ptr<float>()) : 1;
  const bool with_metrics = lse.numel() > 0;
  const bool with_grad = grad.dim() == 2;
  if (with_grad && !grad.is_same(arguments.input)) prepare_fresh_memory(grad);
  std::vector<double> losses(static_cast<size_t>(rows.count()));
  const Written written = {
      losses.data(),
      with_grad ? nullptr : static_cast<math::RowStatistics*>(statistics.mutable_data_ptr()),
      with_grad ? RowWriter(grad) : RowWriter(),
      with_metrics,
      NumberWriter(lse),
      NumberWriter(entropy),
      argmax.mutable_data_ptr<int64_t>()};
  each_row(rows, rows.parts_bytes() + rows.exponentials_bytes(rows.blocks()),
           [&](int64_t row, bool in_parallel, void* scratch) {
             forward_row(rows, written, scale / divide_by, row, in_parallel, scratch);
           });
  *baked.mutable_data_ptr<float>() = scale;
  *divisor.mutable_data_ptr<double>() = divide_by;
  if (arguments.reduction == at::Reduction::None) {
    const NumberWriter each(loss);
    for (int64_t row = 0; row < rows.count(); ++row) each.put(row, losses[row]);
    return;
  }
  double total = 0;
  for (const double of_row : losses) total += of_row;
  NumberWriter(loss).put(0, math::reduced_loss(total, divide_by));
}

void backward(const CrossEntropyArguments& arguments, const at::Tensor& grad_output,
              const at::Tensor& statistics, const at::Tensor& divisor, const at::Tensor& grad) {
  check_cross_entropy_memory(arguments);
  const CpuRows rows(arguments);
  check_targets(rows, arguments);
  const auto* const of_rows = static_cast<const math::RowStatistics*>(statistics.const_data_ptr());
  const auto* const upstream = grad_output.const_data_ptr<double>();
  const double divide_by = *divisor.const_data_ptr<double>();
  const bool is_each = grad_output.dim() == 1;
  prepare_fresh_memory(grad);
  const RowWriter out(grad);
  const auto exponentials = AMPFUSE_CHOOSE(row_exponentials);
  const auto gradient = AMPFUSE_CHOOSE(row_gradient);
  each_row(rows, rows.exponentials_bytes(rows.blocks()),
           [&](int64_t row, bool in_parallel, void* scratch) {
             if (rows.is_ignored(row)) {
               out.zero(row);
               return;
             }
             const math::RowStatistics& known = of_rows[row];
             const math::RowGradient<double> of_row =
                 math::row_gradient(known, rows.reference(known.largest), rows.target_share(row),
                                    rows.z_loss(), upstream[is_each ? row : 0] / divide_by);
             each_block(rows.blocks(), in_parallel, [&](int64_t block) {
               const Logits logits = rows.logits(row, block);
               void* const e =
                   static_cast<char*>(scratch) + rows.exponentials_bytes(in_parallel ? block : 0);
               exponentials(logits, known.largest, e);
               gradient(logits, rows.shares(row, block), e, of_row,
                        out.at(row, block * kClassBlock));
             });
           });
}

void rescale(const at::Tensor& grad, const at::Tensor& baked, const at::Tensor& grad_output) {
  const double expected = *baked.const_data_ptr<float>();
  const double got = grad_output.item<double>();
  if (got == expected) return;
  const RowWriter out(grad);
  const auto scale_chunk = AMPFUSE_CHOOSE(scale_chunk);
  at::parallel_for(0, grad.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      scale_chunk(grad.scalar_type(), out.at(row, 0), grad.size(1), got / expected);
    }
  });
}

constexpr CrossEntropyKernels kKernels = {forward, backward, rescale};

}  // namespace

TORCH_LIBRARY_IMPL(ampfuse, CPU, m) {
  register_cross_entropy<kKernels>(m);
}

}  // namespace ampfuse
