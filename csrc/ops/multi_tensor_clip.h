#pragma once

#include <ATen/core/Tensor.h>

namespace ampfuse {

/// Throws for arguments that the op does not accept.
void check_multi_tensor_clip(at::TensorList tensors, const at::Tensor& total_norm);

/// Checks total_norm only, for kernels in which DenseRuns checks the list.
void check_clip_norm(at::TensorList tensors, const at::Tensor& total_norm);

}  // namespace ampfuse
