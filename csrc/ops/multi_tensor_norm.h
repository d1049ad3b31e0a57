#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "../math/multi_tensor_norm.h"
#include "tensor_list.h"

namespace ampfuse {

/// What every backend's kernel checks first.
void check_multi_tensor_norm(at::TensorList tensors, double ord);

/// 1, 2 or infinity as the enumeration the kernels are compiled for.
math::NormType norm_type(const char* op, double ord);

/// How a norm of this type takes complex tensors.
Complex norm_cut(math::NormType type);

/// total_norm, norms, found_inf, first_nonfinite, nonfinite_count.
using NormOutputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// Fresh outputs of the right shapes and dtypes on the list's device (CPU for an empty list).
NormOutputs empty_norm_outputs(at::TensorList tensors);

/// What an empty list has: norm 0, nothing found.
NormOutputs zero_norm_outputs(c10::Device device);

}  // namespace ampfuse
