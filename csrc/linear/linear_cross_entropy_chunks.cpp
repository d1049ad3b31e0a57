#include "linear_cross_entropy_chunks.h"

#include <algorithm>

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
// once: a GPU takes all rows in one chunk if this saves the bytes that the additional logits take.
// Shards never do this: all ranks must use the same chunks, although the numbers of classes and the
// dtypes of their weights may differ.
int64_t wanted_rows(const LinearCrossEntropyArguments& arguments, int64_t logit_bytes,
                    bool on_gpu) {
  if (arguments.chunk_rows) return *arguments.chunk_rows;
  const ChunkBudget budget = on_gpu ? kOnGpu : kOnCpu;
  const auto& shard = arguments.shard;
  const int64_t classes = shard ? (shard->num_classes + shard->group_size - 1) / shard->group_size
                                : arguments.weight.size(0);
  const int64_t row_bytes = std::max<int64_t>(1, classes * logit_bytes);
  const int64_t fitting = budget.bytes / row_bytes / budget.multiple * budget.multiple;
  const int64_t rows = std::max(fitting, budget.fewest_rows);
  if (!on_gpu || shard) return rows;
  const size_t saved = c10::elementSize(accumulate_dtype(arguments.dtype)) -
                       c10::elementSize(arguments.weight_grad_dtype);
  const int64_t all = arguments.hidden.size(0);
  const int64_t saved_bytes = classes * arguments.weight.size(1) * static_cast<int64_t>(saved);
  return (all - rows) * row_bytes <= saved_bytes ? std::max(all, rows) : rows;
}

}  // namespace

int64_t linear_chunk_rows(const LinearCrossEntropyArguments& arguments, int64_t logit_bytes,
                          bool on_gpu) {
  return std::clamp<int64_t>(wanted_rows(arguments, logit_bytes, on_gpu), 1,
                             std::max<int64_t>(arguments.hidden.size(0), 1));
}

LinearChunks::LinearChunks(const CrossEntropyKernels& kernels,
                           const LinearCrossEntropyArguments& arguments, bool with_gradient)
    : arguments_(arguments),
      layer_(arguments.weight, arguments.bias, arguments.dtype),
      loss_(arguments.loss_of_shard()),
      memory_(kernels, arguments, layer_) {
  // The size does not depend on with_gradient, so that the loss has the same bits. It depends on
  // weight_grad_dtype: without the gradient of a bfloat16 weight, a GPU may use smaller chunks.
  chunk_rows_ = linear_chunk_rows(arguments, memory_.logit_bytes(), arguments.hidden.is_cuda());
  memory_.allocate(std::min(chunk_rows_, rows()), arguments.weight.size(0), with_gradient);
}

LinearCrossEntropyGradients LinearChunks::each(const LinearGradientMask& wanted,
                                               const std::function<void(const Chunk&)>& visit) {
  LinearGradients gradients(arguments_, layer_, wanted, chunks());
  for (int64_t index = 0; index < chunks(); ++index) {
    const int64_t first = index * chunk_rows_;
    const int64_t count = std::min(chunk_rows_, rows() - first);
    const at::Tensor hidden = layer_.rows(arguments_.hidden, first, count);
    const int64_t classes = arguments_.weight.size(0);
    Chunk chunk = {index, first, count, loss_, memory_.grad(count, classes)};
    chunk.loss.input = memory_.values(count, classes);
    chunk.loss.target = loss_.target.narrow(0, first, count);
    at::Tensor logits = memory_.values(count, layer_.classes());
    layer_.logits(hidden, logits);
    visit(chunk);
    if (!any(wanted)) continue;
    gradients.add(memory_.padded_grad(count, classes, layer_.classes()), hidden, first);
  }
  // Free the logits first: finish() may allocate a rounded gradient of the weight.
  memory_.free();
  return gradients.finish();
}

}  // namespace ampfuse
