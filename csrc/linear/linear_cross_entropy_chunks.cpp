#include "linear_cross_entropy_chunks.h"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "../cpu/fresh_memory.h"
#include "../tensors/dtype_name.h"
#include "linear_cross_entropy_gradients.h"

namespace ampfuse {

namespace {

// Each chunk reads and writes the gradient of the weight: 8 bytes per element of [classes,
// features], for 2·rows floating-point operations. On an H100 (700 TFLOP/s, 3 TB/s) this takes as
// long as the product itself with 930 rows, and a quarter as long with 3700 rows. On two cores of a
// CPU it takes as long as the product with 60 rows. So a chunk has as many rows as the budget has
// room for, but at least `fewest_rows`.
struct ChunkBudget {
  int64_t bytes;
  int64_t fewest_rows;
  int64_t multiple;  // rows are a multiple of it: whole tiles of a product
};
constexpr ChunkBudget kOnGpu = {int64_t{1} << 30, 2048, 256};
constexpr ChunkBudget kOnCpu = {int64_t{64} << 20, 128, 32};

// Several chunks sum the weight's gradient in float. A single chunk may round it to 16 bits at
// once: a GPU takes all rows in one chunk if this saves more bytes than the additional logits take.
// Shards never do this: all ranks must use the same chunks, although the numbers of classes and the
// dtypes of their weights may differ.
int64_t chunk_rows(const LinearCrossEntropyArguments& arguments, int64_t logit_bytes) {
  if (arguments.chunk_rows) return *arguments.chunk_rows;
  const ChunkBudget budget = arguments.hidden.is_cuda() ? kOnGpu : kOnCpu;
  const auto& shard = arguments.shard;
  const int64_t classes = shard ? (shard->num_classes + shard->group_size - 1) / shard->group_size
                                : arguments.weight.size(0);
  const int64_t row_bytes = std::max<int64_t>(1, classes * logit_bytes);
  const int64_t fitting = budget.bytes / row_bytes / budget.multiple * budget.multiple;
  const int64_t rows = std::max(fitting, budget.fewest_rows);
  if (!arguments.hidden.is_cuda() || shard) return rows;
  const size_t saved = c10::elementSize(accumulate_dtype(arguments.dtype)) -
                       c10::elementSize(arguments.weight_grad_dtype);
  const int64_t all = arguments.hidden.size(0);
  const int64_t gradient = classes * arguments.weight.size(1) * static_cast<int64_t>(saved);
  return (all - rows) * row_bytes <= gradient ? std::max(all, rows) : rows;
}

}  // namespace

LinearChunks::LinearChunks(const CrossEntropyKernels& kernels,
                           const LinearCrossEntropyArguments& arguments, bool with_gradient)
    : arguments_(arguments),
      head_(arguments.weight, arguments.bias, arguments.dtype),
      loss_(arguments.loss_of_shard()) {
  loss_.are_targets_checked = true;
  loss_.gradient_limit = arguments.gradient_limit();
  const at::ScalarType logits_dtype = arguments.logits_dtype;
  const at::ScalarType grad_dtype = head_.gradient_dtype();
  TORCH_CHECK_TYPE(logits_dtype == grad_dtype || logits_dtype == head_.sum_dtype(),
                   kLinearCrossEntropy, ": logits_dtype: expected ", dtype_name(head_.sum_dtype()),
                   ", since this device has no products of ", dtype_name(arguments.dtype), ", got ",
                   dtype_name(logits_dtype));
  const bool has_own_grad = grad_dtype != logits_dtype && !kernels.narrows_in_place;
  // Chunks have the same size with and without gradients, so that the loss has the same bits.
  const size_t bytes =
      c10::elementSize(logits_dtype) + (has_own_grad ? c10::elementSize(grad_dtype) : 0);
  rows_ = std::clamp<int64_t>(chunk_rows(arguments, static_cast<int64_t>(bytes)), 1,
                              std::max<int64_t>(rows(), 1));
  const int64_t classes = arguments.weight.size(0);
  // Rows start at aligned addresses for any number of classes, which products and kernels prefer.
  constexpr int64_t kAlignment = 64;
  const int64_t stride = (classes + kAlignment - 1) / kAlignment * kAlignment;
  const auto memory_for_rows = [&](at::ScalarType dtype) {
    const auto options = arguments.hidden.options().dtype(dtype);
    const at::Tensor memory = at::empty({std::min(rows_, rows()), stride}, options);
    // The memory of the weight's gradient is not prepared: it is written so much later that the
    // preparation would take more time than it saves.
    prepare_fresh_memory(memory);
    return memory;
  };
  const at::Tensor logits = memory_for_rows(logits_dtype);
  logits_ = logits.narrow(1, 0, classes);
  if (!with_gradient) {
    grad_ = at::empty({0}, arguments.hidden.options().dtype(grad_dtype));
    return;
  }
  const at::Tensor grad = has_own_grad ? memory_for_rows(grad_dtype) : logits.view(grad_dtype);
  grad_ = grad.narrow(1, 0, classes);
  // Products on a GPU read whole vectors, also of the padding after the gradient's classes. The
  // results do not depend on it, but it must not be undefined.
  if (grad.is_cuda()) grad.narrow(1, classes, stride - classes).zero_();
}

LinearCrossEntropyGradients LinearChunks::each(const LinearGradientMask& wanted,
                                               const std::function<void(const Chunk&)>& visit) {
  LinearGradients gradients(arguments_, head_, wanted, chunks());
  for (int64_t index = 0; index < chunks(); ++index) {
    const int64_t first = index * rows_;
    const int64_t count = std::min(rows_, rows() - first);
    const at::Tensor hidden = head_.rows(arguments_.hidden, first, count);
    Chunk chunk = {index, first, count, loss_,
                   grad_.dim() == 1 ? grad_ : grad_.narrow(0, 0, count)};
    chunk.loss.input = logits_.narrow(0, 0, count);
    chunk.loss.target = loss_.target.narrow(0, first, count);
    head_.logits(hidden, chunk.loss.input);
    visit(chunk);
    gradients.add(chunk.grad, hidden, first);
  }
  // Frees memory for the rounded gradients that finish() allocates.
  logits_.reset();
  grad_.reset();
  return gradients.finish();
}

}  // namespace ampfuse
