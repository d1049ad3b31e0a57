#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/cross_entropy.h>
#include <ampfuse/export.h>
#include <ampfuse/vocab_shard.h>
#include <torch/arg.h>

#include <optional>
#include <string>

namespace ampfuse {

/// Those of CrossEntropyOptions mean the same.
struct AMPFUSE_API LinearCrossEntropyOptions {
  /// [classes]: what each class weighs.
  TORCH_ARG(std::optional<at::Tensor>, class_weight) = std::nullopt;
  TORCH_ARG(int64_t, ignore_index) = -100;
  TORCH_ARG(std::string, reduction) = "mean";
  TORCH_ARG(double, label_smoothing) = 0.0;
  /// What backward will be called with. With any other number the gradients are multiplied by the
  /// ratio, in a pass over them that rounds those of 16 bits a second time. Without it half
  /// gradients are formed of losses that are not divided yet.
  TORCH_ARG(std::optional<at::Tensor>, grad_scale) = std::nullopt;
  TORCH_ARG(std::optional<at::Tensor>, denominator) = std::nullopt;
  TORCH_ARG(double, z_loss) = 0.0;
  TORCH_ARG(std::optional<double>, softcap) = std::nullopt;
  /// How many rows at a time. By default as many as 64 MiB of logits hold on a CPU, but at least
  /// 128, and 1 GiB of logits and their gradient on a GPU, but at least 2048, whatever the number
  /// of rows there are.
  TORCH_ARG(std::optional<int64_t>, chunk_rows) = std::nullopt;
  /// Float of the weight's shape (double for doubles), that backward adds the weight's gradient to.
  /// The weight gets none then.
  TORCH_ARG(std::optional<at::Tensor>, accumulate_into) = std::nullopt;
  /// Set if weight, bias and probabilities are those of some classes, and other ranks have the
  /// rest. All ranks pass the same hidden states, the same targets (numbered among all classes),
  /// the class weights of all classes and the same options. All get the same loss, and the whole
  /// gradient of the hidden states. A loss is NaN if the shards do not cover all classes, or if no
  /// shard has the row's target; other differences between ranks are not detected.
  TORCH_ARG(std::optional<VocabShard>, shard) = std::nullopt;
};

/// ampfuse::cross_entropy of torch::nn::functional::linear(hidden, weight, bias), of whose logits
/// only a chunk of rows is there at a time. Hidden states have shape [..., features], the weight
/// [classes, features], the bias [classes]; targets are classes of shape [...] (int64, int32,
/// uint8) or probabilities of shape [..., classes].
///
/// All that is multiplied is of one dtype; under autocast it becomes that one, once. Logits are of
/// float where that is half or bfloat16, and so is the sum that becomes the weight's gradient,
/// rounded to the dtype of the weight, or not at all where weight.grad_dtype() is float. The loss
/// is float, double for doubles.
///
/// With reductions mean and sum, backward has nothing left to multiply but what it is called with.
/// With "none" it computes the logits once more. Tensors that require no grad cost no product.
///
/// Throws as ampfuse::cross_entropy does. There is no second derivative.
AMPFUSE_API at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                            const at::Tensor& target,
                                            const std::optional<at::Tensor>& bias = std::nullopt,
                                            const LinearCrossEntropyOptions& options = {});

AMPFUSE_API CrossEntropyWithMetrics linear_cross_entropy_with_metrics(
    const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
    const std::optional<at::Tensor>& bias = std::nullopt,
    const LinearCrossEntropyOptions& options = {});

}  // namespace ampfuse
