// Converts scalars, class weights and probabilities for kernels, and computes the metric `correct`.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace ampfuse {

/// Converts a scalar argument to a 0-dim tensor of this dtype on this device. Returns nullopt if it
/// is absent. Throws if it requires grad.
std::optional<at::Tensor> loss_scalar(const char* op, const char* name,
                                      const std::optional<at::Tensor>& scalar, at::ScalarType dtype,
                                      at::Device device);

/// Converts class weights to `dtype`, the dtype of the loss. Returns nullopt if they are absent.
/// Throws if they require grad.
std::optional<at::Tensor> loss_class_weight(const char* op, const char* name,
                                            const std::optional<at::Tensor>& weight,
                                            const c10::SymInt& classes, at::ScalarType dtype,
                                            at::Device device);

/// Converts probabilities, if needed, to a dtype that kernels read for losses of `loss_dtype`.
at::Tensor readable_probabilities(const at::Tensor& target, at::ScalarType loss_dtype);

/// Returns a bool per row: true if argmax is the target, or with probabilities the most probable
/// class; false for ignored rows. Probabilities have their classes along `class_dim`.
at::Tensor correct_predictions(const at::Tensor& argmax, const at::Tensor& target,
                               int64_t ignore_index, int64_t class_dim);

}  // namespace ampfuse
