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

/// Module like torch::nn::CrossEntropyLoss that calls ampfuse::cross_entropy.
///
/// With a scaler, `grad_scale` must not be set: the module uses the scaler's scale, the upstream
/// gradient of scaler.scale(loss).backward(). To keep that gradient when accumulating, call each
/// micro-batch with the denominator of the whole batch and do not divide its loss. Copies of the
/// module refer to the same scaler, which must outlive them and must not move.
struct AMPFUSE_API CrossEntropyLossImpl : torch::nn::Cloneable<CrossEntropyLossImpl> {
  explicit CrossEntropyLossImpl(CrossEntropyOptions options = {}, GradScaler* scaler = nullptr);

  void reset() override;
  void pretty_print(std::ostream& stream) const override;

  /// Returns the loss. `denominator` replaces the one in the options.
  at::Tensor forward(const at::Tensor& input, const at::Tensor& target,
                     const std::optional<at::Tensor>& denominator = std::nullopt);

  CrossEntropyOptions options;  ///< all options except the weight
  at::Tensor weight;            ///< buffer of shape [classes], or undefined
  GradScaler* scaler;

 protected:
  FORWARD_HAS_DEFAULT_ARGS({2, torch::nn::AnyValue(std::optional<at::Tensor>())})
};

TORCH_MODULE(CrossEntropyLoss);

}  // namespace ampfuse
