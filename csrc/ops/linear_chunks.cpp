#include "linear_chunks.h"

#include <ATen/ops/empty.h>

#include <algorithm>

namespace ampfuse {

namespace {

// Each chunk reads and writes the gradient of the weight: 8 bytes of [classes, features], beside
// 2·rows·features multiplications for each class. On an H100, 700 TFLOP/s and 3 TB/s, that takes as
// long as its product for 930 rows, and a quarter of it for 3700. Two cores of a CPU multiply for
// 60 rows that long. So a chunk has as many rows as the budget has room for, but not fewer than
// that.
struct ChunkBudget {
  int64_t bytes;
  int64_t fewest_rows;
  int64_t multiple;  // whole tiles of a product
};
constexpr ChunkBudget kOnGpu = {int64_t{1} << 30, 2048, 256};
constexpr ChunkBudget kOnCpu = {int64_t{64} << 20, 128, 32};

int64_t chunk_rows(const LinearCrossEntropyArguments& arguments, int64_t logit_bytes) {
  if (arguments.chunk_rows) return *arguments.chunk_rows;
  const ChunkBudget budget = arguments.hidden.is_cuda() ? kOnGpu : kOnCpu;
  // Processes that share classes out go through the same chunks.
  const auto& shard = arguments.shard;
  const int64_t classes = shard ? (shard->num_classes + shard->group_size - 1) / shard->group_size
                                : arguments.weight.size(0);
  const int64_t row_bytes = std::max<int64_t>(1, classes * logit_bytes);
  const int64_t rows = budget.bytes / row_bytes / budget.multiple * budget.multiple;
  return std::max(rows, budget.fewest_rows);
}

}  // namespace

LinearChunks::LinearChunks(const LinearCrossEntropyArguments& arguments, bool with_gradient)
    : arguments_(arguments),
      head_(arguments.weight, arguments.bias, arguments.dtype),
      loss_(arguments.loss_of_shard()) {
  loss_.is_weighed = true;
  const auto options = arguments.hidden.options();
  const bool is_apart = head_.gradient_dtype() != head_.logits_dtype();
  // With and without gradients, so that the loss has the same bits.
  const size_t bytes = c10::elementSize(head_.logits_dtype()) +
                       (is_apart ? c10::elementSize(head_.gradient_dtype()) : 0);
  rows_ = std::clamp<int64_t>(chunk_rows(arguments, static_cast<int64_t>(bytes)), 1,
                              std::max<int64_t>(count(), 1));
  const int64_t classes = arguments.weight.size(0);
  // Rows begin at boundaries that products and kernels like, whatever the number of classes.
  constexpr int64_t kAlignment = 64;
  const int64_t stride = (classes + kAlignment - 1) / kAlignment * kAlignment;
  const auto rows_of = [&](at::ScalarType dtype) {
    return at::empty({std::min(rows_, count()), stride}, options.dtype(dtype))
        .narrow(1, 0, classes);
  };
  logits_ = rows_of(head_.logits_dtype());
  grad_ = is_apart && with_gradient ? rows_of(head_.gradient_dtype()) : logits_;
  // A GPU's products read what is beside the gradient's classes, though nothing comes of it.
  if (with_gradient && grad_.is_cuda() && stride > classes) {
    grad_.as_strided({grad_.size(0), stride - classes}, {stride, 1}, classes).zero_();
  }
}

void LinearChunks::each(const LinearGradientMask& wanted,
                        const LinearCrossEntropyGradients& gradients,
                        const std::function<void(const Chunk&)>& visit) const {
  auto [of_hidden, of_weight, of_bias] = gradients;
  ShardSums sums;
  for (int64_t number = 0; number < this->number(); ++number) {
    const int64_t first = number * rows_;
    const int64_t rows = std::min(rows_, count() - first);
    const at::Tensor hidden = head_.rows(arguments_.hidden, first, rows);
    Chunk chunk = {number, first, rows, loss_, at::Tensor()};
    chunk.loss.input = logits_.narrow(0, 0, rows);
    chunk.loss.target = loss_.target.narrow(0, first, rows);
    head_.logits(hidden, chunk.loss.input);
    chunk.grad = grad_.is_same(logits_) ? chunk.loss.input : grad_.narrow(0, 0, rows);
    visit(chunk);
    if (wanted[0]) {
      const at::Tensor of_rows = of_hidden.narrow(0, first, rows);
      if (arguments_.shard) {
        // Rounded when it is whole.
        const auto wide = of_rows.options().dtype(head_.logits_dtype());
        const at::Tensor part = at::empty(of_rows.sizes(), wide);
        head_.hidden_gradient(chunk.grad, part);
        sums.begin(*arguments_.shard, part, of_rows);
      } else {
        head_.hidden_gradient(chunk.grad, of_rows);
      }
    }
    if (wanted[1]) head_.weight_gradient(chunk.grad, hidden, of_weight, number == 0);
    if (wanted[2]) head_.bias_gradient(chunk.grad, of_bias, number == 0);
  }
  sums.finish();
  if (number() > 0) return;
  if (wanted[1]) of_weight.zero_();
  if (wanted[2]) of_bias.zero_();
}

}  // namespace ampfuse
