#pragma once

#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>

#include "../math/multi_tensor_norm.h"
#include "../tensors/tensor_list.h"

namespace ampfuse {

/// Throws for arguments that the op does not accept.
void check_multi_tensor_norm(at::TensorList tensors, double ord,
                             std::optional<at::ScalarType> dtype);

/// Throws unless the dtype is absent, float or double.
void check_norm_dtype(const char* op, std::optional<at::ScalarType> dtype);

/// Converts an order of 1, 2 or infinity to the enumeration that kernels are compiled for. Throws
/// for other orders.
math::NormType norm_type(const char* op, double ord);

/// Returns how a norm of this type reads complex tensors.
ComplexAs complex_as(math::NormType type);

/// The tensors total_norm, norms, found_inf, first_nonfinite and nonfinite_count.
using NormOutputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// Allocates outputs on the list's device (the CPU for an empty list). `dtype` is the dtype of the
/// norms, by default norm_dtype(tensors).
NormOutputs empty_norm_outputs(at::TensorList tensors, std::optional<at::ScalarType> dtype);

/// Returns the outputs for an empty list: norm 0, no non-finite element.
NormOutputs zero_norm_outputs(c10::Device device, std::optional<at::ScalarType> dtype);

}  // namespace ampfuse
