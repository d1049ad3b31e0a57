#pragma once

#include <ATen/core/Tensor.h>

namespace ampfuse {

/// What every backend's kernel checks first.
void check_multi_tensor_clip(at::TensorList tensors, const at::Tensor& total_norm);

}  // namespace ampfuse
