// A chunk of rows at a time: their logits, in memory that all chunks share; the loss, and its
// gradient in the same pass; what that makes of the gradients of what the logits were made of.
//
// Beside these gradients there is memory for a chunk's logits, 4 bytes each, and for their gradient
// of 16 bits 2 more.
#include <ATen/TensorOperators.h>
#include <ATen/ops/amax.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/isfinite.h>
#include <ATen/ops/ones.h>
#include <ATen/ops/ones_like.h>
#include <ATen/ops/where.h>
#include <ATen/ops/zeros.h>
#include <c10/core/DispatchKeySet.h>
#include <c10/core/impl/LocalDispatchKeySet.h>

#include <algorithm>

#include "linear_cross_entropy.h"
#include "linear_head.h"

namespace ampfuse {

namespace {

using OptionalTensor = std::optional<at::Tensor>;

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
  const int64_t row_bytes = std::max<int64_t>(1, arguments.weight.size(0) * logit_bytes);
  const int64_t rows = budget.bytes / row_bytes / budget.multiple * budget.multiple;
  return std::max(rows, budget.fewest_rows);
}

// Products here are in the dtype that was chosen before.
const c10::DispatchKeySet kAutocastKeys({c10::DispatchKey::AutocastCPU,
                                         c10::DispatchKey::AutocastCUDA});

// The chunks of a call, and the memory that they share.
class Chunks {
 public:
  Chunks(const LinearCrossEntropyArguments& arguments, bool with_gradient)
      : arguments_(arguments),
        head_(arguments.weight, arguments.bias, arguments.dtype),
        loss_(arguments.loss()) {
    const auto options = arguments.hidden.options();
    const bool is_apart = with_gradient && head_.gradient_dtype() != head_.logits_dtype();
    const int64_t bytes = static_cast<int64_t>(c10::elementSize(head_.logits_dtype())) +
                          (is_apart ? static_cast<int64_t>(c10::elementSize(arguments.dtype)) : 0);
    rows_ = chunk_rows(arguments, bytes);
    const int64_t most = std::min(rows_, count());
    const int64_t classes = arguments.weight.size(0);
    // Rows begin at boundaries that products and kernels like, whatever the number of classes.
    constexpr int64_t kAlignment = 64;
    const int64_t stride = (classes + kAlignment - 1) / kAlignment * kAlignment;
    const auto rows_of = [&](at::ScalarType dtype) {
      return at::empty({most, stride}, options.dtype(dtype)).narrow(1, 0, classes);
    };
    logits_ = rows_of(head_.logits_dtype());
    grad_ = is_apart ? rows_of(head_.gradient_dtype()) : logits_;
  }

  int64_t count() const { return arguments_.hidden.size(0); }
  int64_t number() const { return (count() + rows_ - 1) / rows_; }
  const CrossEntropyArguments& loss() const { return loss_; }

  // Calls visit(chunk, its first row, its rows, loss of its logits, where their gradient goes) and
  // adds up what that left there in `gradients`.
  template <typename Visit>
  void each(const LinearGradientMask& wanted, const LinearCrossEntropyGradients& gradients,
            const Visit& visit) {
    for (int64_t chunk = 0; chunk < number(); ++chunk) {
      const int64_t first = chunk * rows_;
      const int64_t rows = std::min(rows_, count() - first);
      const at::Tensor hidden = head_.rows(arguments_.hidden, first, rows);
      CrossEntropyArguments loss = loss_;
      loss.input = logits_.narrow(0, 0, rows);
      loss.target = loss_.target.narrow(0, first, rows);
      loss.is_weighed = true;
      head_.logits(hidden, loss.input);
      const at::Tensor grad = grad_.is_same(logits_) ? loss.input : grad_.narrow(0, 0, rows);
      visit(chunk, first, rows, loss, grad);
      auto [of_hidden, of_weight, of_bias] = gradients;
      if (wanted[0]) head_.hidden_gradient(grad, of_hidden.narrow(0, first, rows));
      if (wanted[1]) head_.weight_gradient(grad, hidden, of_weight, chunk == 0);
      if (wanted[2]) head_.bias_gradient(grad, of_bias, chunk == 0);
    }
    if (number() > 0) return;
    if (wanted[1]) std::get<1>(gradients).zero_();
    if (wanted[2]) std::get<2>(gradients).zero_();
  }

 private:
  const LinearCrossEntropyArguments& arguments_;
  LinearHead head_;
  CrossEntropyArguments loss_;
  int64_t rows_;
  at::Tensor logits_;
  at::Tensor grad_;
};

void check_all_memory(const LinearCrossEntropyArguments& arguments) {
  constexpr const char* kOp = "linear_cross_entropy";
  check_memory(kOp, "hidden", arguments.hidden);
  check_memory(kOp, "weight", arguments.weight);
  if (arguments.bias) check_memory(kOp, "bias", *arguments.bias);
}

// What half gradients are multiplied by where nobody said what is to come: what makes them no
// larger than 1.
at::Tensor half_scale(const CrossEntropyArguments& loss, const at::Tensor& divisor) {
  const at::Tensor scale = loss.reduction == at::Reduction::Mean
                               ? divisor.to(at::kFloat)
                               : at::ones({}, divisor.options().dtype(at::kFloat));
  return loss.weight ? scale / loss.weight->abs().amax().clamp_min(1) : scale;
}

}  // namespace

LinearCrossEntropyOutputs linear_cross_entropy_by_chunk(
    const CrossEntropyKernels& kernels, const LinearCrossEntropyArguments& arguments,
    const OptionalTensor& grad_scale, const OptionalTensor& denominator,
    const LinearGradientMask& wanted, bool with_metrics) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocastKeys);
  const auto outputs = empty_linear_outputs(arguments, wanted, with_metrics);
  const auto& [loss, grad_hidden, grad_weight, grad_bias, baked, statistics, divisor, lse, entropy,
               argmax] = outputs;
  const bool is_each = arguments.reduction == at::Reduction::None;
  const bool with_gradient = any(wanted) && !is_each;
  check_all_memory(arguments);
  Chunks chunks(arguments, with_gradient);
  at::Tensor total = at::empty({}, divisor.options());
  kernels.weigh(chunks.loss(), total);
  if (denominator) total = *denominator;
  OptionalTensor scale = grad_scale;
  if (!scale && with_gradient && arguments.dtype == at::kHalf) {
    scale = half_scale(chunks.loss(), total);
  }
  const at::Tensor losses = at::empty({is_each ? 0 : chunks.number()}, loss.options());
  const auto some = [](const at::Tensor& all, int64_t first, int64_t rows) {
    return all.numel() == 0 ? all : all.narrow(0, first, rows);
  };
  chunks.each(with_gradient ? wanted : LinearGradientMask{}, {grad_hidden, grad_weight, grad_bias},
              [&](int64_t chunk, int64_t first, int64_t rows, const CrossEntropyArguments& here,
                  const at::Tensor& grad) {
                kernels.forward(here, scale, total,
                                {is_each ? loss.narrow(0, first, rows) : losses.select(0, chunk),
                                 with_gradient ? grad : at::empty({0}, grad.options()), baked,
                                 some(statistics, first, rows), divisor, some(lse, first, rows),
                                 some(entropy, first, rows), some(argmax, first, rows)});
              });
  if (chunks.number() == 0) {
    baked.fill_(1);
    arguments.reduction == at::Reduction::Mean ? divisor.copy_(total) : divisor.fill_(1);
    if (!is_each) loss.copy_(at::zeros({}, total.options()) / divisor);
  } else if (!is_each) {
    loss.copy_(losses.sum(at::kDouble));
  }
  return outputs;
}

LinearCrossEntropyGradients linear_cross_entropy_again_by_chunk(
    const CrossEntropyKernels& kernels, const at::Tensor& grad_output,
    const LinearCrossEntropyArguments& arguments, const at::Tensor& statistics,
    const at::Tensor& divisor, const LinearGradientMask& wanted) {
  const c10::impl::ExcludeDispatchKeyGuard no_autocast(kAutocastKeys);
  const auto gradients = empty_linear_gradients(arguments, wanted);
  check_all_memory(arguments);
  Chunks chunks(arguments, /*with_gradient=*/true);
  kernels.weigh(chunks.loss(), at::empty({}, divisor.options()));
  at::Tensor upstream = grad_output.to(at::kDouble).contiguous();
  OptionalTensor peak;
  if (arguments.dtype == at::kHalf && upstream.numel() > 0) {
    // As in half_scale.
    const at::Tensor largest = upstream.abs().amax();
    const at::Tensor is_usable = at::isfinite(largest).logical_and(largest > 0);
    peak = at::where(is_usable, largest, at::ones_like(largest));
    upstream = upstream / *peak;
  }
  chunks.each(wanted, gradients,
              [&](int64_t, int64_t first, int64_t rows, const CrossEntropyArguments& here,
                  const at::Tensor& grad) {
                kernels.backward(here, upstream.narrow(0, first, rows),
                                 statistics.narrow(0, first, rows), divisor, grad);
              });
  if (!peak) return gradients;
  auto [of_hidden, of_weight, of_bias] = gradients;
  for (at::Tensor* const gradient : {&of_hidden, &of_weight, &of_bias}) gradient->mul_(*peak);
  return gradients;
}

}  // namespace ampfuse
