// Registers a backend's kernels of linear cross-entropy.
#pragma once

#include "linear_cross_entropy.h"
#include "registration.h"

namespace ampfuse {

/// The functions that a backend implements. Their arguments are checked.
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

/// Computes the loss in chunks of rows or tiles of classes, with a backend's cross-entropy kernels.
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

inline LinearGradientMask mask_of(const NamedArguments& named) {
  const auto wanted = named["output_mask"].toBoolList();
  return {wanted[0], wanted[1], wanted[2]};
}

template <const LinearCrossEntropyKernels& kKernels>
LinearCrossEntropyOutputs forward(const NamedArguments& named) {
  const auto arguments = LinearCrossEntropyArguments::from(named);
  const auto grad_scale = named.optional_tensor("grad_scale");
  const auto denominator = named.optional_tensor("denominator");
  check_linear_cross_entropy(arguments, grad_scale, denominator);
  return kKernels.forward(arguments, grad_scale, denominator, mask_of(named),
                          named["with_metrics"].toBool());
}

template <const LinearCrossEntropyKernels& kKernels>
LinearCrossEntropyGradients backward(const NamedArguments& named) {
  const auto arguments = LinearCrossEntropyArguments::from(named);
  const at::Tensor& grad_output = named.tensor("grad_output");
  const at::Tensor& statistics = named.tensor("statistics");
  const at::Tensor& divisor = named.tensor("divisor");
  check_linear_cross_entropy(arguments, std::nullopt, std::nullopt);
  check_cross_entropy_backward("linear_cross_entropy_backward", arguments.loss(), grad_output,
                               statistics, divisor);
  return kKernels.backward(grad_output, arguments, statistics, divisor, mask_of(named));
}

}  // namespace linear_cross_entropy_kernels

template <const LinearCrossEntropyKernels& kKernels>
void register_linear_cross_entropy(torch::Library& library) {
  namespace kernels = linear_cross_entropy_kernels;
  library.impl("linear_cross_entropy_forward", kernel_by_name<kernels::forward<kKernels>>());
  library.impl("linear_cross_entropy_backward", kernel_by_name<kernels::backward<kKernels>>());
}

}  // namespace ampfuse
