#pragma once

#include <ATen/core/Tensor.h>

#include <tuple>

#include "multi_tensor_norm.h"

namespace ampfuse {

/// Checks the list, found_inf and inv_scale. `op` is multi_tensor_unscale or
/// multi_tensor_unscale_norm; `ord` and `dtype` of the latter are not checked here.
void check_multi_tensor_unscale(const char* op, at::TensorList tensors, const at::Tensor& found_inf,
                                const at::Tensor& inv_scale);

/// Checks found_inf and inv_scale only, for kernels in which DenseRuns checks the list.
void check_unscale_scalars(const char* op, at::TensorList tensors, const at::Tensor& found_inf,
                           const at::Tensor& inv_scale);

/// The tensors total_norm, norms, first_nonfinite and nonfinite_count.
using UnscaledNormOutputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>;

/// Returns the outputs without found_inf, which multi_tensor_unscale_norm takes as an argument.
inline UnscaledNormOutputs unscaled(const NormOutputs& outputs) {
  const auto& [total_norm, norms, found_inf, first_nonfinite, nonfinite_count] = outputs;
  return {total_norm, norms, first_nonfinite, nonfinite_count};
}

}  // namespace ampfuse
