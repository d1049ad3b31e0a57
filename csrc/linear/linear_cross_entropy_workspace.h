// How much memory a linear cross-entropy takes, for tools that compute this without calling it.
#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>

#include <optional>

namespace ampfuse {

/// Estimates the bytes that linear_cross_entropy_forward takes at its peak, besides its arguments
/// and results, on a GPU or on a CPU. Only shapes and dtypes of the tensors are read. Not counted
/// are shards, the padding of rows of logits, and the float copies of hidden states and weight that
/// a CPU without products of their dtype makes.
AMPFUSE_API int64_t linear_cross_entropy_workspace(const at::Tensor& hidden,
                                                   const at::Tensor& weight, at::ScalarType dtype,
                                                   at::ScalarType logits_dtype,
                                                   at::ScalarType weight_grad_dtype,
                                                   std::optional<int64_t> chunk_rows,
                                                   std::optional<int64_t> chunk_classes,
                                                   bool with_gradient, bool on_gpu);

}  // namespace ampfuse
