#include "../ops/cross_entropy_kernels.h"
#include "bad_targets.h"
#include "cross_entropy_interface.h"
#include "logit_rows.h"
#include "torch_caller.h"

namespace ampfuse {

namespace {

void weigh(const CrossEntropyArguments& arguments, const at::Tensor& total) {
  check_target_memory(arguments);
  TorchCaller caller(total);
  BadTargets& bad_targets = bad_targets_of(caller);
  bad_targets.raise_earlier();
  if (arguments.has_probabilities()) {  // each row counts as 1; do not convert them all to float
    total.fill_(static_cast<double>(arguments.rows().expect_int()));
    return;
  }
  at::Tensor converted;
  LogitRows rows = logit_rows(arguments, converted);
  bad_targets.report_for(rows);
  launch_cross_entropy_weigh(caller, rows, total.mutable_data_ptr<double>());
}

void forward(const CrossEntropyArguments& arguments, const std::optional<at::Tensor>& grad_scale,
             const std::optional<at::Tensor>& denominator, const CrossEntropyOutputs& outputs) {
  check_cross_entropy_memory(arguments);
  const at::Tensor& grad = outputs.grad;
  TorchCaller caller(arguments.input);
  BadTargets& bad_targets = bad_targets_of(caller);
  if (!arguments.are_targets_checked) bad_targets.raise_earlier();
  at::Tensor converted;
  LogitRows rows = logit_rows(arguments, converted);
  bad_targets.report_for(rows);
  TORCH_INTERNAL_ASSERT(!rows.are_positions || grad.scalar_type() == rows.dtype);
  const ForwardPointers pointers = {
      .is_mean = arguments.options.is_mean(),
      .is_per_row = arguments.options.is_per_row(),
      .gradient_limit = arguments.gradient_limit,
      .grad_scale = grad_scale ? grad_scale->const_data_ptr<float>() : nullptr,
      .denominator = denominator ? denominator->const_data_ptr<double>() : nullptr,
      .loss = outputs.loss.mutable_data_ptr(),
      .baked_scale = outputs.baked_scale.mutable_data_ptr<float>(),
      .divisor = outputs.divisor.mutable_data_ptr<double>(),
      .statistics = statistics_or_null(outputs.statistics),
      .lse = data_or_null(outputs.lse),
      .entropy = data_or_null(outputs.entropy),
      .argmax = data_or_null<int64_t>(outputs.argmax),
      .grad = data_or_null(grad),
      .grad_dtype = grad.scalar_type(),
      .grad_at = grad.numel() > 0 ? rows_at(grad) : RowsAt{}};
  launch_cross_entropy_forward(caller, rows, pointers);
}

void backward(const CrossEntropyArguments& arguments, const at::Tensor& grad_output,
              const at::Tensor& statistics, const at::Tensor& divisor, const at::Tensor& grad) {
  check_cross_entropy_memory(arguments);
  TorchCaller caller(arguments.input);
  at::Tensor converted;
  const LogitRows rows = logit_rows(arguments, converted);
  const BackwardPointers pointers = {
      .statistics = static_cast<const math::RowStatistics*>(statistics.const_data_ptr()),
      .divisor = divisor.const_data_ptr<double>(),
      .grad_output = grad_output.const_data_ptr<double>(),
      .is_per_row = grad_output.dim() == 1,
      .grad = grad.mutable_data_ptr(),
      .grad_dtype = grad.scalar_type(),
      .grad_at = rows_at(grad)};
  launch_cross_entropy_backward(caller, rows, pointers);
}

void rescale(const at::Tensor& grad, const at::Tensor& baked_scale, const at::Tensor& grad_output) {
  TorchCaller caller(grad);
  // Elements that a warp takes at a time from a contiguous gradient, whatever its row length.
  constexpr int64_t kChunk = 4096;
  const bool in_chunks = grad.is_contiguous();
  const int64_t stride = in_chunks ? kChunk : grad.stride(0);
  const int64_t count = in_chunks ? kChunk : grad.size(1);
  check_classes("cross_entropy_rescale_", "grad", count);
  const RescaledRows rows = {.grad = grad.mutable_data_ptr(),
                             .dtype = grad.scalar_type(),
                             .stride = stride,
                             .extent = in_chunks ? grad.numel() : grad.size(0) * stride,
                             .count = static_cast<int>(count)};
  launch_cross_entropy_rescale(caller, rows, baked_scale.const_data_ptr<float>(),
                               grad_output.const_data_ptr());
}

}  // namespace

constexpr CrossEntropyKernels kCrossEntropyCuda = {weigh, forward, backward, rescale};

AMPFUSE_KERNELS(CUDA, m) {
  register_cross_entropy<kCrossEntropyCuda>(m);
}

}  // namespace ampfuse
