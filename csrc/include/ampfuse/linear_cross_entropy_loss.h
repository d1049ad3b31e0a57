#pragma once

#include <ampfuse/export.h>
#include <ampfuse/grad_scaler.h>
#include <ampfuse/linear_cross_entropy.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/modules/linear.h>
#include <torch/nn/pimpl.h>

#include <optional>
#include <ostream>

namespace ampfuse {

/// A module with the last layer of a model and its loss, which ampfuse::linear_cross_entropy
/// computes. LinearCrossEntropyLoss is its holder.
///
/// To share the weight with an embedding, call linear_cross_entropy instead: a tensor that is
/// assigned to `linear->weight` is used, but is not saved, not cloned and not among parameters().
///
/// Pass a scaler if the training uses one. The module then passes its scale as `grad_scale`, since
/// that is the upstream gradient of scaler.scale(loss).backward(). To accumulate gradients, call
/// the module for each micro-batch with the denominator of the whole batch, and do not divide its
/// loss.
///
/// Several threads may call a module at the same time if it has no scaler.
struct AMPFUSE_API LinearCrossEntropyLossImpl : torch::nn::Cloneable<LinearCrossEntropyLossImpl> {
  /// \param linear The sizes of the layer (features, classes), and whether it has a bias.
  /// \param options The options of each call. With a scaler, `grad_scale` must not be set.
  /// \param scaler The scaler of the training, or null. Clones of the module refer to the same one.
  ///     It may move, but forward() throws if it no longer exists.
  /// \throws c10::ValueError if both a scaler and a `grad_scale` are given.
  explicit LinearCrossEntropyLossImpl(const torch::nn::LinearOptions& linear,
                                      LinearCrossEntropyOptions options = {},
                                      WeakScaler scaler = nullptr);

  /// Registers a new layer, and the class weights as a buffer, which is a copy.
  void reset() override;

  /// Prints the name of the module and its options.
  void pretty_print(std::ostream& stream) const override;

  /// Returns the loss.
  ///
  /// \param hidden The inputs of the layer, of shape [..., features].
  /// \param target Class indices or probabilities, as for linear_cross_entropy.
  /// \param denominator Replaces the denominator in the options.
  /// \throws c10::Error if the module has a scaler that no longer exists.
  at::Tensor forward(const at::Tensor& hidden, const at::Tensor& target,
                     const std::optional<at::Tensor>& denominator = std::nullopt);

  torch::nn::LinearOptions linear_options;  ///< the sizes of the layer
  LinearCrossEntropyOptions options;   ///< all options; a later class_weight replaces the buffer
  torch::nn::Linear linear = nullptr;  ///< holds the layer's parameters; its forward is not called
  /// The class weights, of shape [classes], or undefined. The buffer has Python's name, "weight".
  at::Tensor class_weight;
  WeakScaler scaler;  ///< the scaler whose scale is used, or none

 protected:
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(std::optional<at::Tensor>())})
};

/// The holder of LinearCrossEntropyLossImpl, which behaves as a shared pointer to it.
TORCH_MODULE(LinearCrossEntropyLoss);

}  // namespace ampfuse
