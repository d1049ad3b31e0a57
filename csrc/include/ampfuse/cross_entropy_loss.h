#pragma once

#include <ampfuse/cross_entropy.h>
#include <ampfuse/export.h>
#include <ampfuse/grad_scaler.h>
#include <torch/nn/cloneable.h>
#include <torch/nn/modules/common.h>
#include <torch/nn/pimpl.h>

#include <optional>
#include <ostream>

namespace ampfuse {

/// A module like torch::nn::CrossEntropyLoss that calls ampfuse::cross_entropy. CrossEntropyLoss is
/// its holder.
///
/// Pass a scaler if the training uses one. The module then passes its scale as `grad_scale`, since
/// that is the upstream gradient of scaler.scale(loss).backward(). To accumulate gradients, call
/// the module for each micro-batch with the denominator of the whole batch, and do not divide its
/// loss.
///
/// Several threads may call a module at the same time if it has no scaler.
struct AMPFUSE_API CrossEntropyLossImpl : torch::nn::Cloneable<CrossEntropyLossImpl> {
  /// \param options The options of each call. With a scaler, `grad_scale` must not be set.
  /// \param scaler The scaler of the training, or null. Clones of the module refer to the same one.
  ///     It may move, but forward() throws if it no longer exists.
  /// \throws c10::ValueError if both a scaler and a `grad_scale` are given.
  explicit CrossEntropyLossImpl(CrossEntropyOptions options = {}, WeakScaler scaler = nullptr);

  /// Registers the class weights as a buffer, which is a copy.
  void reset() override;

  /// Prints the name of the module and its options.
  void pretty_print(std::ostream& stream) const override;

  /// Returns the loss.
  ///
  /// \param input Logits, as for cross_entropy.
  /// \param target Class indices or probabilities, as for cross_entropy.
  /// \param denominator Replaces the denominator in the options.
  /// \throws c10::Error if the module has a scaler that no longer exists.
  at::Tensor forward(const at::Tensor& input, const at::Tensor& target,
                     const std::optional<at::Tensor>& denominator = std::nullopt);

  CrossEntropyOptions options;  ///< all options; a weight that is set later replaces the buffer
  at::Tensor weight;            ///< the class weights: a buffer of shape [classes], or undefined
  WeakScaler scaler;            ///< the scaler whose scale is used, or none

 protected:
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(std::optional<at::Tensor>())})
};

/// The holder of CrossEntropyLossImpl, which behaves as a shared pointer to it.
TORCH_MODULE(CrossEntropyLoss);

}  // namespace ampfuse
