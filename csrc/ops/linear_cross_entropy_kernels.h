// How a backend registers linear cross-entropy: products are ATen's, the rest are its kernels of
// cross-entropy.
#pragma once

#include <torch/library.h>

#include "linear_cross_entropy.h"

namespace ampfuse {

/// What a backend does with checked arguments.
struct LinearCrossEntropyKernels {
  LinearCrossEntropyOutputs (*forward)(const LinearCrossEntropyArguments& arguments,
                                       const std::optional<at::Tensor>& grad_scale,
                                       const std::optional<at::Tensor>& denominator,
                                       const LinearGradientMask& wanted, bool with_metrics);
  LinearCrossEntropyGradients (*backward)(const at::Tensor& grad_output,
                                          const LinearCrossEntropyArguments& arguments,
                                          const at::Tensor& statistics, const at::Tensor& divisor,
                                          const LinearGradientMask& wanted);
};

/// By chunks.
template <const CrossEntropyKernels& kKernels, const VocabShardKernels& kShardKernels>
inline constexpr LinearCrossEntropyKernels kByChunk = {
    [](const LinearCrossEntropyArguments& arguments, const std::optional<at::Tensor>& grad_scale,
       const std::optional<at::Tensor>& denominator, const LinearGradientMask& wanted,
       bool with_metrics) {
      return linear_cross_entropy_forward_by_chunk(kKernels, kShardKernels, arguments, grad_scale,
                                                   denominator, wanted, with_metrics);
    },
    [](const at::Tensor& grad_output, const LinearCrossEntropyArguments& arguments,
       const at::Tensor& statistics, const at::Tensor& divisor, const LinearGradientMask& wanted) {
      return linear_cross_entropy_backward_by_chunk(kKernels, grad_output, arguments, statistics,
                                                    divisor, wanted);
    }};

namespace linear_cross_entropy_kernels {

using OptionalTensor = std::optional<at::Tensor>;

template <const LinearCrossEntropyKernels& kKernels>
LinearCrossEntropyOutputs forward(
    const at::Tensor& hidden, const at::Tensor& weight, const OptionalTensor& bias,
    const at::Tensor& target, const OptionalTensor& class_weight, int64_t reduction,
    int64_t ignore_index, double label_smoothing, const OptionalTensor& grad_scale,
    const OptionalTensor& denominator, double z_loss, std::optional<double> softcap, int64_t dtype,
    int64_t weight_grad_dtype, std::optional<int64_t> chunk_rows,
    std::optional<c10::string_view> group, at::OptionalIntArrayRef vocab_shard,
    LinearGradientMask wanted, bool with_metrics) {
  const LinearCrossEntropyArguments arguments = {
      .hidden = hidden,
      .weight = weight,
      .bias = bias,
      .target = target,
      .class_weight = class_weight,
      .reduction = reduction,
      .ignore_index = ignore_index,
      .label_smoothing = label_smoothing,
      .z_loss = z_loss,
      .softcap = softcap,
      .dtype = static_cast<at::ScalarType>(dtype),
      .weight_grad_dtype = static_cast<at::ScalarType>(weight_grad_dtype),
      .chunk_rows = chunk_rows,
      .shard = vocab_shard_of(group, vocab_shard)};
  check_linear_cross_entropy(arguments, grad_scale, denominator);
  return kKernels.forward(arguments, grad_scale, denominator, wanted, with_metrics);
}

template <const LinearCrossEntropyKernels& kKernels>
LinearCrossEntropyGradients backward(
    const at::Tensor& grad_output, const at::Tensor& hidden, const at::Tensor& weight,
    const OptionalTensor& bias, const at::Tensor& target, const OptionalTensor& class_weight,
    const at::Tensor& statistics, const at::Tensor& divisor, int64_t reduction,
    int64_t ignore_index, double label_smoothing, double z_loss, std::optional<double> softcap,
    int64_t dtype, int64_t weight_grad_dtype, std::optional<int64_t> chunk_rows,
    std::optional<c10::string_view> group, at::OptionalIntArrayRef vocab_shard,
    LinearGradientMask wanted) {
  const LinearCrossEntropyArguments arguments = {
      .hidden = hidden,
      .weight = weight,
      .bias = bias,
      .target = target,
      .class_weight = class_weight,
      .reduction = reduction,
      .ignore_index = ignore_index,
      .label_smoothing = label_smoothing,
      .z_loss = z_loss,
      .softcap = softcap,
      .dtype = static_cast<at::ScalarType>(dtype),
      .weight_grad_dtype = static_cast<at::ScalarType>(weight_grad_dtype),
      .chunk_rows = chunk_rows,
      .shard = vocab_shard_of(group, vocab_shard)};
  check_linear_cross_entropy(arguments, std::nullopt, std::nullopt);
  check_cross_entropy_backward("linear_cross_entropy_backward", arguments.loss(), grad_output,
                               statistics, divisor);
  return kKernels.backward(grad_output, arguments, statistics, divisor, wanted);
}

}  // namespace linear_cross_entropy_kernels

template <const LinearCrossEntropyKernels& kKernels>
void register_linear_cross_entropy(torch::Library& library) {
  namespace kernels = linear_cross_entropy_kernels;
  library.impl("linear_cross_entropy_forward", kernels::forward<kKernels>);
  library.impl("linear_cross_entropy_backward", kernels::backward<kKernels>);
}

}  // namespace ampfuse
