// What losses are passed beside their large tensors, as their kernels take it, and what they tell
// beside a loss.
#pragma once

#include <ATen/core/Tensor.h>

#include <optional>

namespace ampfuse {

/// Of one number, a 0-dim tensor of this dtype on this device. Refuses what requires grad.
std::optional<at::Tensor> loss_number(const char* op, const char* name,
                                      const std::optional<at::Tensor>& scalar, at::ScalarType dtype,
                                      at::Device device);

/// What classes weigh, in the dtype that a loss is computed in. Refuses what requires grad.
std::optional<at::Tensor> loss_class_weight(const char* op, const char* name,
                                            const std::optional<at::Tensor>& weight,
                                            const c10::SymInt& classes, at::ScalarType dtype,
                                            at::Device device);

/// In a dtype that a loss of this dtype reads.
at::Tensor readable_probabilities(const at::Tensor& target, at::ScalarType loss_dtype);

/// True where the largest logit is the target's, or the most probable class's; false for ignored
/// rows. Probabilities have their classes along `class_dim`.
at::Tensor correct_predictions(const at::Tensor& argmax, const at::Tensor& target,
                               int64_t ignore_index, int64_t class_dim);

}  // namespace ampfuse
