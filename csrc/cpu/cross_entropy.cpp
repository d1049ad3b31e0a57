// A thread takes rows, or where rows are fewer than threads the blocks of one row: results are
// joined in the order of blocks either way, so that nothing depends on how many threads there are.
#include <ATen/Parallel.h>
#include <c10/core/CPUAllocator.h>

#include <cmath>
#include <cstring>

#include "../ops/cross_entropy_kernels.h"
#include "cross_entropy_rows.h"
#include "large_pages.h"
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
  at::parallel_for(0, blocks, in_parallel ? 1 : blocks, [&](int64_t begin, int64_t end) {
    for (int64_t block = begin; block < end; ++block) visit(block);
  });
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

void* at_class(const at::Tensor& matrix, int64_t row, int64_t first) {
  return static_cast<char*>(matrix.mutable_data_ptr()) +
         (row * matrix.stride(0) + first) * matrix.itemsize();
}

// What a call writes, as memory; null where it is not wanted.
struct Written {
  double* losses;  // of rows, before they are reduced
  math::RowStatistics* statistics;
  const at::Tensor* grad;
  const at::Tensor* lse;
  const at::Tensor* entropy;
  int64_t* argmax;
};

// One number of a tensor that is float or double.
void put(const at::Tensor& tensor, int64_t index, double value) {
  if (tensor.scalar_type() == at::kDouble) {
    tensor.mutable_data_ptr<double>()[index] = value;
  } else {
    tensor.mutable_data_ptr<float>()[index] = static_cast<float>(value);
  }
}

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
  const bool with_metrics = written.argmax != nullptr;
  if (is_ignored) {
    written.losses[row] = 0;
    written.statistics[row] = {};
    if (written.grad) {
      std::memset(at_class(*written.grad, row, 0), 0, rows.classes() * written.grad->itemsize());
    }
    if (!with_metrics) return;
  }
  auto* const parts = static_cast<RowPart*>(scratch);
  auto* const exponentials = static_cast<char*>(scratch) + rows.parts_bytes();
  const auto part = AMPFUSE_CHOOSE(row_part);
  each_block(blocks, in_parallel, [&](int64_t block) {
    parts[block] = part(rows.logits(row, block), rows.shares(row, block), with_metrics,
                        exponentials + rows.exponentials_bytes(block));
  });
  RowPart whole;
  for (int64_t block = 0; block < blocks; ++block) whole = math::join(whole, parts[block]);
  const math::RowTarget<double> target = rows.row_target(row);
  const math::RowLoss<double> loss = math::row_loss(whole, target, rows.z_loss());
  if (with_metrics) {
    put(*written.lse, row, loss.lse);
    put(*written.entropy, row, loss.entropy);
    written.argmax[row] = first_largest(rows, row);
  }
  if (is_ignored) return;
  written.losses[row] = loss.loss;
  written.statistics[row] = loss.statistics;
  if (written.grad == nullptr) return;
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
             at_class(*written.grad, row, block * kClassBlock));
  });
}

// What backward is expected to be called with: something to multiply by.
float baked_scale(const std::optional<at::Tensor>& grad_scale) {
  const float scale = grad_scale ? *grad_scale->const_data_ptr<float>() : 1;
  return std::isfinite(scale) && scale != 0 ? scale : 1;
}

void forward(const CrossEntropyArguments& arguments, const std::optional<at::Tensor>& grad_scale,
             const std::optional<at::Tensor>& denominator, const CrossEntropyOutputs& outputs) {
  const auto& [loss, grad, baked, statistics, divisor, lse, entropy, argmax] = outputs;
  const CpuRows rows(arguments);
  const double weight = check_targets(rows, arguments);
  const bool is_mean = arguments.reduction == at::Reduction::Mean;
  const double divide_by = !is_mean      ? 1
                           : denominator ? *denominator->const_data_ptr<double>()
                                         : weight;
  const float scale = baked_scale(grad_scale);
  const bool with_metrics = lse.numel() == rows.count() && lse.numel() > 0;
  if (grad.dim() == 2 && !grad.is_same(arguments.input)) prefer_large_pages(grad);
  std::vector<double> losses(static_cast<size_t>(rows.count()));
  const Written written = {losses.data(),
                           static_cast<math::RowStatistics*>(statistics.mutable_data_ptr()),
                           grad.dim() == 2 ? &grad : nullptr,
                           with_metrics ? &lse : nullptr,
                           with_metrics ? &entropy : nullptr,
                           with_metrics ? argmax.mutable_data_ptr<int64_t>() : nullptr};
  each_row(rows, rows.parts_bytes() + rows.exponentials_bytes(rows.blocks()),
           [&](int64_t row, bool in_parallel, void* scratch) {
             forward_row(rows, written, scale / divide_by, row, in_parallel, scratch);
           });
  *baked.mutable_data_ptr<float>() = scale;
  *divisor.mutable_data_ptr<double>() = divide_by;
  if (arguments.reduction == at::Reduction::None) {
    for (int64_t row = 0; row < rows.count(); ++row) put(loss, row, losses[row]);
    return;
  }
  double total = 0;
  for (const double of_row : losses) total += of_row;
  put(loss, 0, total / divide_by);
}

void backward(const CrossEntropyArguments& arguments, const at::Tensor& grad_output,
              const at::Tensor& statistics, const at::Tensor& divisor, const at::Tensor& grad) {
  const CpuRows rows(arguments);
  const auto* const of_rows = static_cast<const math::RowStatistics*>(statistics.const_data_ptr());
  const auto* const upstream = grad_output.const_data_ptr<double>();
  const double divide_by = *divisor.const_data_ptr<double>();
  const bool is_each = grad_output.dim() == 1;
  prefer_large_pages(grad);
  const auto exponentials = AMPFUSE_CHOOSE(row_exponentials);
  const auto gradient = AMPFUSE_CHOOSE(row_gradient);
  each_row(rows, rows.exponentials_bytes(rows.blocks()),
           [&](int64_t row, bool in_parallel, void* scratch) {
             if (rows.is_ignored(row)) {
               std::memset(at_class(grad, row, 0), 0, rows.classes() * grad.itemsize());
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
                        at_class(grad, row, block * kClassBlock));
             });
           });
}

void rescale(const at::Tensor& grad, const at::Tensor& baked, const at::Tensor& grad_output) {
  const double expected = *baked.const_data_ptr<float>();
  const double got = grad_output.item<double>();
  if (got == expected) return;
  const auto scale_chunk = AMPFUSE_CHOOSE(scale_chunk);
  at::parallel_for(0, grad.size(0), 1, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      scale_chunk(grad.scalar_type(), at_class(grad, row, 0), grad.size(1), got / expected);
    }
  });
}

constexpr CrossEntropyKernels kKernels = {forward, backward, rescale};

}  // namespace

TORCH_LIBRARY_IMPL(ampfuse, CPU, m) {
  register_cross_entropy<kKernels>(m);
}

}  // namespace ampfuse
