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

/// The last layer of a model and its loss, by ampfuse::linear_cross_entropy. The layer, `linear`,
/// is never called. To share a weight with an embedding call linear_cross_entropy with it: what is
/// assigned to `linear->weight` is used, but neither saved, cloned nor among parameters().
///
/// With a scaler it expects the gradient that scaler.scale(loss).backward() brings, and takes no
/// `grad_scale`. The parts of an accumulated batch are called with its denominator, and their
/// losses not divided, so that this stays so. The scaler, which is not copied with the module, has
/// to outlive it where it is.
struct AMPFUSE_API LinearCrossEntropyLossImpl : torch::nn::Cloneable<LinearCrossEntropyLossImpl> {
  explicit LinearCrossEntropyLossImpl(const torch::nn::LinearOptions& linear,
                                      LinearCrossEntropyOptions options = {},
                                      GradScaler* scaler = nullptr);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// `denominator`: instead of the options' one.
  at::Tensor forward(const at::Tensor& hidden, const at::Tensor& target,
                     const std::optional<at::Tensor>& denominator = std::nullopt);

  torch::nn::LinearOptions linear_options;
  LinearCrossEntropyOptions options;  ///< but for the classes' weight
  torch::nn::Linear linear = nullptr;
  at::Tensor weight;  ///< a buffer, what classes weigh: [classes], or undefined
  GradScaler* scaler;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(std::optional<at::Tensor>())})
};

TORCH_MODULE(LinearCrossEntropyLoss);

}  // namespace ampfuse
