#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/cross_entropy.h>
#include <ampfuse/export.h>
#include <ampfuse/vocab_shard.h>
#include <torch/arg.h>

#include <iosfwd>
#include <optional>
#include <string>

namespace ampfuse {

/// Options of linear_cross_entropy. All have a default, so `{}` is valid where the function takes
/// them. Modules need the name of the class.
struct AMPFUSE_API LinearCrossEntropyOptions {
  /// Weights of the classes, of shape [classes].
  TORCH_ARG(std::optional<at::Tensor>, class_weight) = std::nullopt;
  /// Rows with this target are ignored: they have no loss and no gradient.
  TORCH_ARG(int64_t, ignore_index) = -100;
  /// "none" returns the loss of each row, "sum" their sum, and "mean" the sum divided by the total
  /// weight of the rows that are not ignored, or by `denominator`.
  TORCH_ARG(std::string, reduction) = "mean";
  /// The share of each target that is spread evenly over all classes, from 0 to 1.
  TORCH_ARG(double, label_smoothing) = 0.0;
  /// The upstream gradient that backward will receive, for example a loss scale: one element. If
  /// backward receives another one, an extra pass multiplies the gradients by the ratio and rounds
  /// 16-bit gradients a second time. Without grad_scale, half gradients are computed for the sum of
  /// the losses and divided afterwards, so that they do not underflow.
  TORCH_ARG(std::optional<at::Tensor>, grad_scale) = std::nullopt;
  /// The number that "mean" divides by, instead of the total weight of the batch: one element. If
  /// all micro-batches use the same one, their gradients add up to the gradient of the whole batch.
  TORCH_ARG(std::optional<at::Tensor>, denominator) = std::nullopt;
  /// Each row's loss is increased by z_loss times the square of its log-sum-exp.
  TORCH_ARG(double, z_loss) = 0.0;
  /// If set, softcap · tanh(logits / softcap) takes the place of the logits.
  TORCH_ARG(std::optional<double>, softcap) = std::nullopt;
  /// The number of rows in a chunk. By default, a chunk has as many rows as fit into 64 MiB of
  /// logits on a CPU (at least 128), or into 1 GiB of logits and their gradient on a GPU (at least
  /// 2048). A GPU takes all rows in one chunk if that takes no more memory: the gradient of a
  /// bfloat16 weight is then stored in bfloat16 at once, whereas several chunks sum it in float.
  TORCH_ARG(std::optional<int64_t>, chunk_rows) = std::nullopt;
  /// Instead of chunks of rows, the loss is computed for all rows and this number of classes at a
  /// time, for "mean" and "sum", without `chunk_rows` and `shard`. Memory is needed for the logits
  /// of these classes, which are float, on a GPU also for their gradient if products are 16-bit,
  /// for 88 bytes per row and tile of classes, and for a float sum of the hidden states' gradient.
  /// If the gradient of the weight is bfloat16, this needs the least memory, since no float sum of
  /// it is kept. It takes four products instead of three: logits are computed twice.
  TORCH_ARG(std::optional<int64_t>, chunk_classes) = std::nullopt;
  /// The dtype of logits if products are in half or bfloat16: float, or the dtype of the products.
  /// With the latter, a GPU needs 2 bytes per logit and gradient instead of 6. But a bfloat16 logit
  /// of 40 is off by up to 1/8, and a half logit beyond 65504 is infinite. The default is float on
  /// a CPU, for shards and with `chunk_classes`, and otherwise the dtype of the products, as in
  /// torch. Shards and `chunk_classes` need float. A CPU needs float, or bfloat16 if it has
  /// bfloat16 products.
  TORCH_ARG(std::optional<at::ScalarType>, logits_dtype) = std::nullopt;
  /// Float tensor of the weight's shape (double for double weights) to which backward adds the
  /// weight's gradient. The weight itself gets no gradient then.
  TORCH_ARG(std::optional<at::Tensor>, accumulate_into) = std::nullopt;
  /// Set this if weight, bias and probabilities cover only some classes, and other ranks have the
  /// rest. All ranks pass the same hidden states, the same targets (numbered among all classes),
  /// the class weights of all classes and the same options. All ranks get the same loss and the
  /// whole gradient of the hidden states. A loss is NaN if the shards do not cover all classes, or
  /// if no shard has the row's target; other differences between ranks are not detected.
  TORCH_ARG(std::optional<VocabShard>, shard) = std::nullopt;

 public:
  /// Sets the reduction to torch::kNone, torch::kMean or torch::kSum.
  LinearCrossEntropyOptions& reduction(const LossReduction& value);
};

/// Prints the options that are set, with their names, without tensors.
AMPFUSE_API std::ostream& operator<<(std::ostream& stream,
                                     const LinearCrossEntropyOptions& options);

/// Computes ampfuse::cross_entropy of torch::nn::functional::linear(hidden, weight, bias), but
/// holds the logits of only one chunk of rows in memory at a time.
///
/// Autocast casts hidden states and weight to its dtype. The bias is added in the dtype of the
/// logits, or in float. If products are in half or bfloat16, the logits are float or of that dtype
/// (logits_dtype). The weight's gradient is then summed in float and rounded to the weight's dtype,
/// or not rounded if weight.grad_dtype() is float.
///
/// With reductions "mean" and "sum", forward computes the gradients, and backward only rescales
/// them if the upstream gradient requires it. With "none", backward computes the logits again. A
/// tensor that requires no grad costs no product for its gradient. A second derivative is not
/// supported.
///
/// \param hidden Hidden states of shape [..., features].
/// \param weight The weight of the layer, of shape [classes, features].
/// \param target Class indices (int64, int32 or uint8) of shape [...], or probabilities of shape
///     [..., classes].
/// \param bias The bias of the layer, of shape [classes]. Hidden states, weight and bias must have
///     the same dtype.
/// \param options See LinearCrossEntropyOptions.
/// \return The loss: float, or double for double tensors. Its shape is [...] for the reduction
///     "none", else 0-dim.
/// \throws c10::IndexError, c10::ValueError or c10::TypeError in the same cases as cross_entropy.
[[nodiscard]] AMPFUSE_API at::Tensor linear_cross_entropy(
    const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
    const std::optional<at::Tensor>& bias = std::nullopt,
    const LinearCrossEntropyOptions& options = {});

/// Computes linear_cross_entropy, and metrics of each row from the same logits.
[[nodiscard]] AMPFUSE_API CrossEntropyWithMetrics linear_cross_entropy_with_metrics(
    const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
    const std::optional<at::Tensor>& bias = std::nullopt,
    const LinearCrossEntropyOptions& options = {});

}  // namespace ampfuse
