#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/export.h>
#include <torch/arg.h>

#include <optional>
#include <string>

namespace ampfuse {

struct AMPFUSE_API CrossEntropyOptions {
  /// [classes]: what each class weighs.
  TORCH_ARG(std::optional<at::Tensor>, weight) = std::nullopt;
  /// Rows with this target count for nothing.
  TORCH_ARG(int64_t, ignore_index) = -100;
  /// "none", "mean" or "sum".
  TORCH_ARG(std::string, reduction) = "mean";
  /// How much of each target is spread over all classes: 0 to 1.
  TORCH_ARG(double, label_smoothing) = 0.0;
  /// What backward will be called with, a loss scale say: one number, on the logits' device. The
  /// gradient is multiplied by it before it is rounded to the logits' dtype, which in half is the
  /// difference between a gradient and zeros.
  TORCH_ARG(std::optional<at::Tensor>, grad_scale) = std::nullopt;
  /// With "mean": what to divide by instead of the batch's own weight, one number. The same one for
  /// the parts of a batch makes their gradients add up to the whole batch's.
  TORCH_ARG(std::optional<at::Tensor>, denominator) = std::nullopt;
  /// Times the square of each row's log-sum-exp, which is added to its loss.
  TORCH_ARG(double, z_loss) = 0.0;
  /// Logits become softcap · tanh(logits / softcap) first.
  TORCH_ARG(std::optional<double>, softcap) = std::nullopt;
};

/// What the same pass tells of each row, in the shape of index targets. Without derivatives.
struct CrossEntropyMetrics {
  at::Tensor lse;      ///< log-sum-exp, of the loss's dtype
  at::Tensor entropy;  ///< of the predicted distribution
  at::Tensor argmax;   ///< int64: the class of the largest logit
  at::Tensor correct;  ///< bool: whether that is the target, or the most probable one
};

struct CrossEntropyWithMetrics {
  at::Tensor loss;
  CrossEntropyMetrics metrics;
};

/// torch::nn::functional::cross_entropy of half, bfloat16, float or double logits of shape
/// [classes], [batch, classes] or [batch, classes, d1, ...], with class indices (int64, int32,
/// uint8) or probabilities. In memory the classes lie next to each other, or what belongs to a
/// class: others are copied, and so is what has few entries of a class, below 16 or a sixteenth of
/// the classes.
///
/// The loss is float, double for double logits, also under autocast, which casts nothing here.
/// Logits are read once: where they require grad and the loss is a mean or a sum, their gradient
/// comes from the same pass, and backward compares what it is called with with `grad_scale` on the
/// device. Where that is what was expected, no further pass follows; else one multiplies. The
/// logits are kept, and the gradient is computed in backward, with reduction "none", for half
/// logits of which nobody said what gradient to expect, and inside torch.compile.
///
/// Throws c10::IndexError for a target that is no class (CPU; on a GPU that row's loss is NaN, and
/// a later call throws), c10::ValueError and c10::TypeError for arguments that do not fit together.
/// There is no second derivative.
AMPFUSE_API at::Tensor cross_entropy(const at::Tensor& input, const at::Tensor& target,
                                     const CrossEntropyOptions& options = {});

AMPFUSE_API CrossEntropyWithMetrics cross_entropy_with_metrics(
    const at::Tensor& input, const at::Tensor& target, const CrossEntropyOptions& options = {});

/// The same for logits of shape [batch, classes] that nobody needs any more: they are overwritten
/// with their gradient, so that no memory but theirs is used. Not for leaves, nor inside
/// torch.compile. A reduction is needed, "mean" or "sum", and for half logits a `grad_scale`.
AMPFUSE_API at::Tensor cross_entropy_(at::Tensor& input, const at::Tensor& target,
                                      const CrossEntropyOptions& options = {});

}  // namespace ampfuse
