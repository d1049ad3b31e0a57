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

/// Module with the last layer of a model and its loss, computed by ampfuse::linear_cross_entropy.
/// `linear` holds the layer's parameters; its forward is never called. To share the weight with an
/// embedding, call linear_cross_entropy instead: a tensor that is assigned to `linear->weight` is
/// used, but is not saved, not cloned and not among parameters().
///
/// With a scaler, `grad_scale` must not be set: the module uses the scaler's scale, the upstream
/// gradient of scaler.scale(loss).backward(). To keep that gradient when accumulating, call each
/// micro-batch with the denominator of the whole batch and do not divide its loss. Copies of the
/// module refer to the same scaler, which must outlive them and must not move.
struct AMPFUSE_API LinearCrossEntropyLossImpl : torch::nn::Cloneable<LinearCrossEntropyLossImpl> {
  explicit LinearCrossEntropyLossImpl(const torch::nn::LinearOptions& linear,
                                      LinearCrossEntropyOptions options = {},
                                      GradScaler* scaler = nullptr);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// Returns the loss. `denominator` replaces the one in the options.
  at::Tensor forward(const at::Tensor& hidden, const at::Tensor& target,
                     const std::optional<at::Tensor>& denominator = std::nullopt);

  torch::nn::LinearOptions linear_options;
  LinearCrossEntropyOptions options;  ///< all options except class_weight
  torch::nn::Linear linear = nullptr;
  at::Tensor weight;  ///< buffer with the weights of the classes: [classes], or undefined
  GradScaler* scaler;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(std::optional<at::Tensor>())})
};

TORCH_MODULE(LinearCrossEntropyLoss);

}  // namespace ampfuse
