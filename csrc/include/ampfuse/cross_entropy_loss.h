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

/// torch::nn::CrossEntropyLoss by ampfuse::cross_entropy.
///
/// With a scaler it expects the gradient that scaler.scale(loss).backward() brings, and takes no
/// `grad_scale`. The parts of an accumulated batch are called with its denominator, and their
/// losses not divided, so that this stays so. The scaler, which is not copied with the module, has
/// to outlive it where it is.
struct AMPFUSE_API CrossEntropyLossImpl : torch::nn::Cloneable<CrossEntropyLossImpl> {
  explicit CrossEntropyLossImpl(CrossEntropyOptions options = {}, GradScaler* scaler = nullptr);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// `denominator`: instead of the options' one.
  at::Tensor forward(const at::Tensor& input, const at::Tensor& target,
                     const std::optional<at::Tensor>& denominator = std::nullopt);

  CrossEntropyOptions options;  ///< but for the weight
  at::Tensor weight;            ///< a buffer: [classes], or undefined
  GradScaler* scaler;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(std::optional<at::Tensor>())})
};

TORCH_MODULE(CrossEntropyLoss);

}  // namespace ampfuse
