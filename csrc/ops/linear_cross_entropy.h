// Cross-entropy of hidden states times a weight, whose logits are never all there at once.
#pragma once

#include <array>
#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "cross_entropy_kernels.h"
#include "cross_entropy_shards.h"

namespace ampfuse {

/// The op's name in error messages.
inline constexpr const char* kLinearCrossEntropy = "linear_cross_entropy";

struct LinearCrossEntropyArguments {
  at::Tensor hidden;                       // [rows, features]
  at::Tensor weight;                       // [classes, features]
  std::optional<at::Tensor> bias;          // [classes]
  at::Tensor target;                       // [rows] indices, or probabilities [rows, classes]
  std::optional<at::Tensor> class_weight;  // [all classes], of the loss's dtype
  LossOptions options = {};
  // The dtype of products, and that of the weight's gradient: the same if it is bfloat16, or
  // accumulate_dtype(dtype).
  at::ScalarType dtype = at::ScalarType::Undefined;
  at::ScalarType weight_grad_dtype = at::ScalarType::Undefined;
  std::optional<int64_t> chunk_rows = {};
  // The classes that weight, bias and probabilities have, if not all.
  std::optional<VocabShard> shard = {};

  /// Upper bound on the scale of the logits' gradients. Half ones are multiplied by the weight and
  /// summed before the real upstream gradient is known, so they need headroom.
  float gradient_limit() const { return dtype == at::kHalf ? 1024.0f : HUGE_VALF; }

  /// All but the tensors, as arguments of the operators below autograd, and back; the public
  /// overloads have no dtypes.
  NamedValues named_options() const;
  void set_options(const FindValue& find);

  static LinearCrossEntropyArguments from(const NamedArguments& named);

  /// The loss's arguments. Its logits have a shape, but no memory: of all classes that targets are
  /// numbered among, or have probabilities of.
  CrossEntropyArguments loss() const;
  /// The same for the classes of this shard.
  CrossEntropyArguments loss_of_shard() const;
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

/// The same as rows: hidden states of shape [..., features], targets of shape [...] or
/// [..., classes], products in the dtype that all have, or that autocast asks for.
class LinearCrossEntropyRows {
 public:
  explicit LinearCrossEntropyRows(LinearCrossEntropyCall as_passed);

  const LinearCrossEntropyCall& call() const { return call_; }
  const LossOptions& options() const { return call_.arguments.options; }

  /// What there is one of per row, in the shape of index targets.
  at::Tensor shaped(const at::Tensor& of_rows) const;
  at::Tensor shaped_loss(const at::Tensor& loss) const;

 private:
  LinearCrossEntropyCall call_;
  std::vector<c10::SymInt> shape_;
};

/// Whose gradients are wanted: the hidden states', the weight's, the bias's.
using LinearGradientMask = std::array<bool, 3>;

inline bool any(const LinearGradientMask& wanted) {
  return wanted[0] || wanted[1] || wanted[2];
}

/// A gradient that is not wanted has shape [0].
struct LinearCrossEntropyGradients {
  at::Tensor hidden;  // of the dtype of the hidden states
  at::Tensor weight;  // of weight_grad_dtype
  at::Tensor bias;    // of the dtype of the loss

  auto tie() { return std::tie(hidden, weight, bias); }
};

/// `gradients` are those of the loss times baked_scale. With reduction none there are statistics
/// instead, if a gradient is wanted. Without a grad_scale, baked_scale is the divisor for half
/// products: otherwise their gradients would be mostly zeros.
struct LinearCrossEntropyOutputs : LossOutputs {
  LinearCrossEntropyGradients gradients;

  auto tie() {
    return std::tie(loss, gradients.hidden, gradients.weight, gradients.bias, baked_scale,
                    statistics, divisor, lse, entropy, argmax);
  }
};

/// The dtype of products of matrices of this dtype: float for 16 bits, whose sums are floats anyway
/// and would only be rounded to be stored.
at::ScalarType accumulate_dtype(at::ScalarType dtype);

/// Refuses what could not be computed.
void check_linear_cross_entropy(const LinearCrossEntropyArguments& arguments,
                                const std::optional<at::Tensor>& grad_scale,
                                const std::optional<at::Tensor>& denominator);

/// Uninitialized memory. The outputs have no gradients yet.
LinearCrossEntropyGradients empty_linear_gradients(const LinearCrossEntropyArguments& arguments,
                                                   const LinearGradientMask& wanted);
LinearCrossEntropyOutputs empty_linear_outputs(const LinearCrossEntropyArguments& arguments,
                                               const LinearGradientMask& wanted, bool with_metrics);

/// By chunks of rows, with a backend's kernels.
LinearCrossEntropyOutputs linear_cross_entropy_forward_by_chunk(
    const CrossEntropyKernels& kernels, const VocabShardKernels& shard_kernels,
    const LinearCrossEntropyArguments& arguments, const std::optional<at::Tensor>& grad_scale,
    const std::optional<at::Tensor>& denominator, const LinearGradientMask& wanted,
    bool with_metrics);

/// For one number from upstream for each row, from logits that are computed once more.
LinearCrossEntropyGradients linear_cross_entropy_backward_by_chunk(
    const CrossEntropyKernels& kernels, const at::Tensor& grad_output,
    const LinearCrossEntropyArguments& arguments, const at::Tensor& statistics,
    const at::Tensor& divisor, const LinearGradientMask& wanted);

/// The operators below autograd.
LinearCrossEntropyOutputs linear_cross_entropy_forward(const LinearCrossEntropyArguments& arguments,
                                                       const std::optional<at::Tensor>& grad_scale,
                                                       const std::optional<at::Tensor>& denominator,
                                                       const LinearGradientMask& wanted,
                                                       bool with_metrics);
LinearCrossEntropyGradients linear_cross_entropy_backward(
    const at::Tensor& grad_output, const LinearCrossEntropyArguments& arguments,
    const at::Tensor& statistics, const at::Tensor& divisor, const LinearGradientMask& wanted);

}  // namespace ampfuse
