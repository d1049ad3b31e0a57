#pragma once

#include <ATen/core/Tensor.h>

namespace ampfuse {

/// What the op asks of its arguments.
void check_multi_tensor_clip(at::TensorList tensors, const at::Tensor& total_norm);

/// The part of it that is not about the list, which DenseRuns checks where kernels run.
void check_clip_norm(at::TensorList tensors, const at::Tensor& total_norm);

/// The CUDA kernel.
void multi_tensor_clip_cuda(at::TensorList tensors, const at::Tensor& total_norm, double max_norm);

}  // namespace ampfuse
