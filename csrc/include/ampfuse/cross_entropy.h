#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>
#include <torch/arg.h>
#include <torch/enum.h>

#include <iosfwd>
#include <optional>
#include <string>
#include <variant>

namespace ampfuse {

/// A reduction as in torch::nn::CrossEntropyLossOptions.
using LossReduction =
    std::variant<torch::enumtype::kNone, torch::enumtype::kMean, torch::enumtype::kSum>;

/// Options of cross_entropy. All have a default, so `{}` is valid where the function takes them.
/// Modules need the name of the class.
struct AMPFUSE_API CrossEntropyOptions {
  /// Weights of the classes, of shape [classes].
  TORCH_ARG(std::optional<at::Tensor>, weight) = std::nullopt;
  /// Rows with this target are ignored: they have no loss and no gradient.
  TORCH_ARG(int64_t, ignore_index) = -100;
  /// "none" returns the loss of each row, "sum" their sum, and "mean" the sum divided by the total
  /// weight of the rows that are not ignored, or by `denominator`.
  TORCH_ARG(std::string, reduction) = "mean";
  /// The share of each target that is spread evenly over all classes, from 0 to 1.
  TORCH_ARG(double, label_smoothing) = 0.0;
  /// The gradient that backward will receive, for example a loss scale: one element, on any device.
  /// The gradient of the logits is multiplied by it before it is rounded to their dtype; without
  /// this, most gradients of half logits would round to zero.
  TORCH_ARG(std::optional<at::Tensor>, grad_scale) = std::nullopt;
  /// The number that "mean" divides by, instead of the total weight of the batch: one element. If
  /// all micro-batches use the same one, their gradients add up to the gradient of the whole batch.
  TORCH_ARG(std::optional<at::Tensor>, denominator) = std::nullopt;
  /// Each row's loss is increased by z_loss times the square of its log-sum-exp.
  TORCH_ARG(double, z_loss) = 0.0;
  /// If set, softcap · tanh(logits / softcap) takes the place of the logits.
  TORCH_ARG(std::optional<double>, softcap) = std::nullopt;

 public:
  /// Sets the reduction to torch::kNone, torch::kMean or torch::kSum.
  CrossEntropyOptions& reduction(const LossReduction& value);
};

/// Prints the options that are set, with their names, without tensors.
AMPFUSE_API std::ostream& operator<<(std::ostream& stream, const CrossEntropyOptions& options);

/// Metrics of each row from the same pass, in the shape of index targets, without a derivative.
struct CrossEntropyMetrics {
  at::Tensor lse;      ///< log-sum-exp, of the loss's dtype
  at::Tensor entropy;  ///< entropy of the predicted distribution
  at::Tensor argmax;   ///< int64: the class with the largest logit
  at::Tensor correct;  ///< bool: argmax is the target, or the target's most probable class
};

/// The result of cross_entropy_with_metrics and linear_cross_entropy_with_metrics.
struct CrossEntropyWithMetrics {
  at::Tensor loss;              ///< the loss, as without metrics
  CrossEntropyMetrics metrics;  ///< the metrics of each row
};

/// Computes the same loss as torch::nn::functional::cross_entropy, in float for 16-bit logits.
///
/// Logits are read in place if the class dimension has stride 1, or if at least
/// max(16, classes / 16) positions of a class are contiguous; otherwise they are copied. Autocast
/// casts nothing here.
///
/// If the logits require grad and the reduction is "mean" or "sum", the same pass over the logits
/// also computes their gradient for an upstream gradient of `grad_scale` (1 if not set). Backward
/// compares the real upstream gradient with it on the device. If they are equal, no further pass
/// follows; otherwise one pass rescales the gradient. In four cases the logits are kept and
/// backward computes the gradient: with reduction "none", for half logits without `grad_scale`, for
/// probabilities that require grad, and inside torch.compile. A second derivative is not supported.
///
/// \param input Logits of shape [classes], [batch, classes] or [batch, classes, d1, ...]: half,
///     bfloat16, float or double.
/// \param target Class indices (int64, int32 or uint8) of the shape of `input` without the classes,
///     or probabilities of the shape of `input`.
/// \param options See CrossEntropyOptions.
/// \return The loss: float, or double for double logits. Its shape is that of the class indices for
///     the reduction "none", else 0-dim.
/// \throws c10::IndexError for a target that is out of range, on the CPU. On a GPU the loss of its
///     row is NaN, and a later call throws.
/// \throws c10::ValueError or c10::TypeError for invalid arguments.
[[nodiscard]] AMPFUSE_API at::Tensor cross_entropy(const at::Tensor& input,
                                                   const at::Tensor& target,
                                                   const CrossEntropyOptions& options = {});

/// Computes cross_entropy, and metrics of each row in the same pass over the logits.
[[nodiscard]] AMPFUSE_API CrossEntropyWithMetrics cross_entropy_with_metrics(
    const at::Tensor& input, const at::Tensor& target, const CrossEntropyOptions& options = {});

/// Computes cross_entropy for logits that are not needed afterwards: their gradient overwrites
/// them, so that no other memory of their size is used.
///
/// \param input Logits of shape [batch, classes], which are written. They must not be a leaf that
///     requires grad. Calls inside torch.compile are not supported.
/// \param target As for cross_entropy.
/// \param options The reduction must be "mean" or "sum". Half logits that require grad need a
///     `grad_scale`.
/// \return The loss, as from cross_entropy, whose errors are also thrown here.
AMPFUSE_API at::Tensor cross_entropy_(at::Tensor& input, const at::Tensor& target,
                                      const CrossEntropyOptions& options = {});

}  // namespace ampfuse
