// Cross-entropy of hidden states times a weight, with the logits of one chunk in memory at a time.
#pragma once

#include <array>
#include <cmath>
#include <optional>
#include <tuple>

#include "cross_entropy_shards.h"

namespace ampfuse {

/// The op's name in error messages.
inline constexpr const char* kLinearCrossEntropy = "linear_cross_entropy";

struct LinearCrossEntropyArguments {
  at::Tensor hidden;                       // [rows, features]
  at::Tensor weight;                       // [classes, features]
  std::optional<at::Tensor> bias;          // [classes]
  at::Tensor target;                       // [rows] indices, or probabilities [rows, classes]
  std::optional<at::Tensor> class_weight;  // [classes of all shards], of the loss's dtype
  LossOptions options = {};
  // The dtype of the matrices that are multiplied.
  at::ScalarType dtype = at::ScalarType::Undefined;
  // `dtype` or accumulate_dtype(dtype).
  at::ScalarType logits_dtype = at::ScalarType::Undefined;
  // accumulate_dtype(dtype); or bfloat16, if `dtype` is bfloat16.
  at::ScalarType weight_grad_dtype = at::ScalarType::Undefined;
  std::optional<int64_t> chunk_rows = {};
  std::optional<int64_t> chunk_classes = {};
  // The classes of weight, bias and probabilities, if these do not have all classes.
  std::optional<VocabShard> shard = {};

  /// Upper bound on |baked_scale / divisor|. fp16 gradients are multiplied by the weight and summed
  /// before grad_output is known, so they need headroom.
  float gradient_limit() const { return dtype == at::kHalf ? 1024.0f : HUGE_VALF; }

  /// True if classes are divided, among ranks or into tiles. The kernels for this read logits of
  /// accumulate_dtype(dtype).
  bool has_shards() const { return shard.has_value() || chunk_classes.has_value(); }

  /// Convert everything except the tensors to arguments of the operators that take rows, and back.
  /// The public operators lack `dtype` and `weight_grad_dtype`, and their `logits_dtype` may be
  /// None: these dtypes are then Undefined.
  NamedValues named_options() const;
  void set_options(const FindValue& find);

  static LinearCrossEntropyArguments from(const NamedArguments& named);

  /// The arguments of the loss. The logits have a shape but no memory. Their classes are those of
  /// all shards, or with probabilities those of this shard.
  CrossEntropyArguments loss() const;
  /// The arguments of the loss for the classes of this shard, whose targets were checked.
  /// `renumbered`: the result of targets_of_shards() for this shard, if it is known.
  CrossEntropyArguments loss_of_shard(const std::optional<at::Tensor>& renumbered = {}) const;
};

/// A call of linear_cross_entropy, of either overload.
struct LinearCrossEntropyCall {
  LinearCrossEntropyArguments arguments;
  std::optional<at::Tensor> grad_scale;
  std::optional<at::Tensor> denominator;
  std::optional<at::Tensor> accumulate_into;
  bool with_metrics = false;

  static LinearCrossEntropyCall from(const NamedArguments& named);
};

/// Hidden states have shape [..., features], targets [...] or [..., classes]. Matrices are
/// multiplied in the dtype that all of them have, or that autocast asks for.
class LinearCrossEntropyRows : public LossRows<LinearCrossEntropyCall> {
 public:
  explicit LinearCrossEntropyRows(LinearCrossEntropyCall as_passed);
};

/// True for the gradients that are wanted: of the hidden states, the weight and the bias.
using LinearGradientMask = std::array<bool, 3>;

inline bool any(const LinearGradientMask& wanted) {
  return wanted[0] || wanted[1] || wanted[2];
}

/// A gradient that is not wanted has shape [0].
struct LinearCrossEntropyGradients {
  at::Tensor hidden;  // in the dtype of the hidden states
  at::Tensor weight;  // in weight_grad_dtype
  at::Tensor bias;    // in the dtype of the loss

  auto tie() { return std::tie(hidden, weight, bias); }
};

/// `gradients` are those of the loss times baked_scale. With reduction none, statistics are
/// computed instead, if a gradient is wanted. For fp16 products or hidden states without a
/// grad_scale, baked_scale is the divisor, divided by the largest |class weight| if that is above
/// 1. With a baked_scale of 1, most gradients would round to 0.
struct LinearCrossEntropyOutputs : LossOutputs {
  LinearCrossEntropyGradients gradients;

  auto tie() {
    return std::tie(loss, gradients.hidden, gradients.weight, gradients.bias, baked_scale,
                    statistics, divisor, lse, entropy, argmax);
  }
};

/// Returns the dtype in which products of matrices of this dtype are summed: float for 16-bit
/// matrices.
at::ScalarType accumulate_dtype(at::ScalarType dtype);

/// Throws for a dtype that logits cannot have.
void check_logits_dtype(at::ScalarType logits_dtype, at::ScalarType dtype, bool in_shards);

/// Throws for arguments from which the loss cannot be computed.
void check_linear_cross_entropy(const LinearCrossEntropyArguments& arguments,
                                const std::optional<at::Tensor>& grad_scale,
                                const std::optional<at::Tensor>& denominator);

/// Allocate uninitialised memory. The gradients in the outputs have shape [0].
LinearCrossEntropyGradients empty_linear_gradients(const LinearCrossEntropyArguments& arguments,
                                                   const LinearGradientMask& wanted);
LinearCrossEntropyOutputs empty_linear_outputs(const LinearCrossEntropyArguments& arguments,
                                               const LinearGradientMask& wanted, bool with_metrics);

/// Computes the loss in chunks of rows, or in tiles of classes, with a backend's kernels.
LinearCrossEntropyOutputs linear_cross_entropy_forward_by_chunk(
    const CrossEntropyKernels& kernels, const VocabShardKernels& shard_kernels,
    const LinearCrossEntropyArguments& arguments, const std::optional<at::Tensor>& grad_scale,
    const std::optional<at::Tensor>& denominator, const LinearGradientMask& wanted,
    bool with_metrics);

/// Computes the logits again, and from them the gradients. `grad_output` has one number per row.
LinearCrossEntropyGradients linear_cross_entropy_backward_by_chunk(
    const CrossEntropyKernels& kernels, const at::Tensor& grad_output,
    const LinearCrossEntropyArguments& arguments, const at::Tensor& statistics,
    const at::Tensor& divisor, const LinearGradientMask& wanted);

/// Call the operators that take rows.
LinearCrossEntropyOutputs linear_cross_entropy_forward(const LinearCrossEntropyCall& call,
                                                       const LinearGradientMask& wanted);
LinearCrossEntropyGradients linear_cross_entropy_backward(
    const at::Tensor& grad_output, const LinearCrossEntropyArguments& arguments,
    const at::Tensor& statistics, const at::Tensor& divisor, const LinearGradientMask& wanted);

}  // namespace ampfuse
