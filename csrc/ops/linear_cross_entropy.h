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
  int64_t reduction;
  int64_t ignore_index;
  double label_smoothing;
  double z_loss;
  std::optional<double> softcap;
  at::ScalarType dtype;              // that is multiplied in
  at::ScalarType weight_grad_dtype;  // that one where it is bfloat16, or its wide one
  std::optional<int64_t> chunk_rows;
  std::optional<VocabShard>
      shard;  // where weight, bias and probabilities are those of some classes

  /// Of what gradients of logits are multiplied by: half ones are multiplied by weights and added
  /// up before backward is called with what may be less.
  float gradient_limit() const { return dtype == at::kHalf ? 1024.0f : HUGE_VALF; }

  /// Of logits that have a shape, but no memory: of all classes that targets are numbered among,
  /// or have probabilities of.
  CrossEntropyArguments loss() const;
  /// Of those that are here.
  CrossEntropyArguments loss_of_shard() const;
};

/// What people pass.
struct LinearCrossEntropyInputs {
  const at::Tensor& hidden;
  const at::Tensor& weight;
  const at::Tensor& target;
  const std::optional<at::Tensor>& bias;
  const std::optional<at::Tensor>& class_weight;
  int64_t reduction;
  int64_t ignore_index;
  double label_smoothing;
  const std::optional<at::Tensor>& grad_scale;
  const std::optional<at::Tensor>& denominator;
  double z_loss;
  std::optional<double> softcap;
  std::optional<int64_t> chunk_rows;
  const std::optional<at::Tensor>& accumulate_into;
  std::optional<VocabShard> shard;
};

struct LinearCrossEntropyCall {
  LinearCrossEntropyArguments arguments;
  std::optional<at::Tensor> grad_scale;
  std::optional<at::Tensor> denominator;
  std::optional<at::Tensor> accumulate_into;
  bool with_metrics;
};

/// The same as rows: hidden states of shape [..., features], targets of shape [...] or
/// [..., classes], products in the dtype that all have, or that autocast asks for.
class LinearCrossEntropyRows {
 public:
  LinearCrossEntropyRows(const LinearCrossEntropyInputs& inputs, bool with_metrics);

  const LinearCrossEntropyCall& call() const { return call_; }

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

/// The hidden states' in their dtype, the weight's in weight_grad_dtype, the bias's in the loss's,
/// in which these two are added up. What is not wanted is [0].
using LinearCrossEntropyGradients = std::tuple<at::Tensor, at::Tensor, at::Tensor>;

/// loss, then gradients of it times `baked`, then baked, statistics, divisor, lse, entropy and
/// argmax as of cross_entropy_forward. With reduction none there are statistics instead of
/// gradients, where these are wanted. Without a grad_scale `baked` is for half products the divisor
/// itself: their gradients would be mostly zeros otherwise.
using LinearCrossEntropyOutputs =
    std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
               at::Tensor, at::Tensor, at::Tensor>;

/// The dtype of products of matrices of this dtype: float for 16 bits, whose sums are floats anyway
/// and would only be rounded to be stored.
at::ScalarType accumulate_dtype(at::ScalarType dtype);

/// Refuses what could not be computed.
void check_linear_cross_entropy(const LinearCrossEntropyArguments& arguments,
                                const std::optional<at::Tensor>& grad_scale,
                                const std::optional<at::Tensor>& denominator);

/// Whose values nobody has written; in outputs there are no gradients yet.
LinearCrossEntropyGradients empty_linear_gradients(const LinearCrossEntropyArguments& arguments,
                                                   const LinearGradientMask& wanted);
LinearCrossEntropyOutputs empty_linear_outputs(const LinearCrossEntropyArguments& arguments,
                                               const LinearGradientMask& wanted, bool with_metrics);
void put_gradients(LinearCrossEntropyOutputs& outputs, LinearCrossEntropyGradients gradients);

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

/// The operators below autograd, as the dispatcher has them.
using LinearCrossEntropyForward = LinearCrossEntropyOutputs(
    const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&,
    const std::optional<at::Tensor>&, int64_t, int64_t, double, const std::optional<at::Tensor>&,
    const std::optional<at::Tensor>&, double, std::optional<double>, int64_t, int64_t,
    std::optional<int64_t>, std::optional<c10::string_view>, at::OptionalIntArrayRef,
    LinearGradientMask, bool);
using LinearCrossEntropyBackward = LinearCrossEntropyGradients(
    const at::Tensor&, const at::Tensor&, const at::Tensor&, const std::optional<at::Tensor>&,
    const at::Tensor&, const std::optional<at::Tensor>&, const at::Tensor&, const at::Tensor&,
    int64_t, int64_t, double, double, std::optional<double>, int64_t, int64_t,
    std::optional<int64_t>, std::optional<c10::string_view>, at::OptionalIntArrayRef,
    LinearGradientMask);
LinearCrossEntropyOutputs linear_cross_entropy_forward(const LinearCrossEntropyArguments& arguments,
                                                       const std::optional<at::Tensor>& grad_scale,
                                                       const std::optional<at::Tensor>& denominator,
                                                       const LinearGradientMask& wanted,
                                                       bool with_metrics);
LinearCrossEntropyGradients linear_cross_entropy_backward(
    const at::Tensor& grad_output, const LinearCrossEntropyArguments& arguments,
    const at::Tensor& statistics, const at::Tensor& divisor, const LinearGradientMask& wanted);

}  // namespace ampfuse
