#include <ATen/ops/empty.h>

#include "../ops/cross_entropy_kernels.h"
#include "cross_entropy_launch.h"
#include "cross_entropy_scalars.cuh"
#include "dispatch.h"
#include "stream.h"
#include "target_complaint.h"

namespace ampfuse {

namespace {

void forward(const CrossEntropyArguments& arguments, const std::optional<at::Tensor>& grad_scale,
             const std::optional<at::Tensor>& denominator, const CrossEntropyOutputs& outputs) {
  const auto& [loss, grad, baked, statistics, divisor, lse, entropy, argmax] = outputs;
  const at::Tensor& input = arguments.input;
  const LaunchStream stream(input);
  TargetComplaints& complaints = target_complaints(input.device());
  complaints.raise_earlier();
  const bool with_metrics = lse.numel() > 0;
  const at::Tensor losses = at::empty({input.size(0)}, divisor.options());
  dispatch_real(input.scalar_type(), [&]<typename scalar_t>() {
    using acc_t = RowAcc<scalar_t>;
    at::Tensor kept;
    const auto table = table_of<scalar_t>(arguments, kept);
    const CrossEntropyScalars scalars = {
        grad_scale ? grad_scale->const_data_ptr<float>() : nullptr,
        denominator ? denominator->const_data_ptr<double>() : nullptr,
        arguments.reduction == at::Reduction::Mean,
        baked.mutable_data_ptr<float>(),
        divisor.mutable_data_ptr<double>(),
        complaints.on_device(),
        complaints.are_fatal()};
    stream.launch(cross_entropy_prepare_kernel<scalar_t>, 1, table, scalars);
    const bool with_grad = grad.dim() == 2;
    const CrossEntropyResults<scalar_t> results = {
        losses.mutable_data_ptr<double>(),
        static_cast<math::RowStatistics*>(statistics.mutable_data_ptr()),
        with_grad ? grad.mutable_data_ptr<scalar_t>() : nullptr,
        with_grad ? grad.stride(0) : 0,
        with_metrics ? lse.mutable_data_ptr<acc_t>() : nullptr,
        with_metrics ? entropy.mutable_data_ptr<acc_t>() : nullptr,
        with_metrics ? argmax.mutable_data_ptr<int64_t>() : nullptr,
        divisor.const_data_ptr<double>(),
        baked.const_data_ptr<float>()};
    for_rows(input, is_plain(arguments) && !with_metrics,
             [&]<typename Team, RowWork kWork>(int64_t warps) {
               stream.launch(cross_entropy_forward_kernel<scalar_t, Team, kWork>, warps, table,
                             results);
             });
    stream.launch(cross_entropy_finish_kernel<acc_t>, 1, losses.const_data_ptr<double>(),
                  input.size(0), divisor.const_data_ptr<double>(),
                  arguments.reduction == at::Reduction::None, loss.mutable_data_ptr<acc_t>());
  });
}

void backward(const CrossEntropyArguments& arguments, const at::Tensor& grad_output,
              const at::Tensor& statistics, const at::Tensor& divisor, const at::Tensor& grad) {
  const LaunchStream stream(arguments.input);
  dispatch_real(arguments.input.scalar_type(), [&]<typename scalar_t>() {
    at::Tensor kept;
    const auto table = table_of<scalar_t>(arguments, kept);
    for_rows(arguments.input, is_plain(arguments),
             [&]<typename Team, RowWork kWork>(int64_t warps) {
               stream.launch(cross_entropy_backward_kernel<scalar_t, Team, kWork>, warps, table,
                             static_cast<const math::RowStatistics*>(statistics.const_data_ptr()),
                             divisor.const_data_ptr<double>(), grad_output.const_data_ptr<double>(),
                             grad_output.dim() == 1, grad.mutable_data_ptr<scalar_t>());
             });
  });
}

void rescale(const at::Tensor& grad, const at::Tensor& baked, const at::Tensor& grad_output) {
  const LaunchStream stream(grad);
  dispatch_real(grad.scalar_type(), [&]<typename scalar_t>() {
    stream.launch(cross_entropy_rescale_kernel<scalar_t>, grad.size(0),
                  grad.mutable_data_ptr<scalar_t>(), grad.stride(0), grad.size(0),
                  static_cast<int>(grad.size(1)), baked.const_data_ptr<float>(),
                  grad_output.const_data_ptr<RowAcc<scalar_t>>());
  });
}

constexpr CrossEntropyKernels kKernels = {forward, backward, rescale};

}  // namespace

TORCH_LIBRARY_IMPL(ampfuse, CUDA, m) {
  register_cross_entropy<kKernels>(m);
}

}  // namespace ampfuse
