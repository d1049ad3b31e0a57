#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "../math/multi_tensor_norm.h"
#include "../tensors/tensor_list.h"

namespace ampfuse {

/// What the op asks of its arguments; of the list DenseRuns asks the same where kernels run.
void check_multi_tensor_norm(at::TensorList tensors, double ord,
                             std::optional<at::ScalarType> dtype);

/// Refuses a dtype that norms cannot have.
void check_norm_dtype(const char* op, std::optional<at::ScalarType> dtype);

/// 1, 2 or infinity as the enumeration the kernels are compiled for.
math::NormType norm_type(const char* op, double ord);

/// How a norm of this type takes complex tensors.
Complex norm_cut(math::NormType type);

/// total_norm, norms, found_inf, first_nonfinite, nonfinite_count.
using NormOutputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// Fresh outputs of the right shapes and dtypes on the list's device (CPU for an empty list).
/// `dtype`: of the norms, if it is not to be that which the tensors have.
NormOutputs empty_norm_outputs(at::TensorList tensors, std::optional<at::ScalarType> dtype);

/// What an empty list has: norm 0, nothing found.
NormOutputs zero_norm_outputs(c10::Device device, std::optional<at::ScalarType> dtype);

/// The CUDA kernel.
NormOutputs multi_tensor_norm_cuda(at::TensorList tensors, double ord,
                                   std::optional<at::ScalarType> dtype);

}  // namespace ampfuse
