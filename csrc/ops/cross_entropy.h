// Cross-entropy as kernels see it: rows of logits, whatever shape the caller passed. If the classes
// of a row are far apart in memory, as in [batch, classes, height, width], each position of the
// image is a row, and the positions of a class are contiguous.
#pragma once

#include <ATen/core/Tensor.h>

#include <cmath>
#include <optional>
#include <tuple>
#include <vector>

#include "cross_entropy_options.h"

namespace ampfuse {

/// The op's name in error messages.
inline constexpr const char* kCrossEntropy = "cross_entropy";

struct CrossEntropyArguments {
  // [rows, classes] with contiguous classes, or [batch, classes, positions] with contiguous
  // positions, which is batch · positions rows.
  at::Tensor input;
  at::Tensor target;                 // [rows] indices, or probabilities of the shape of input
  std::optional<at::Tensor> weight;  // [classes], of dtype loss_dtype(input)
  LossOptions options = {};
  // True if these rows are part of a batch whose targets were checked before. The divisor of that
  // batch's mean is then passed as `denominator`.
  bool are_targets_checked = false;
  // Number of classes of all shards, if `input` is one shard: targets may be math::kElsewhere then.
  std::optional<int64_t> all_classes = {};
  // Upper bound on |baked_scale / divisor|. A larger grad_scale is lowered by powers of two
  // (math::baked_scale).
  float gradient_limit = HUGE_VALF;

  /// Reads the arguments that all operators except cross_entropy_rescale_ share.
  static CrossEntropyArguments from(const NamedArguments& named);

  bool has_probabilities() const { return target.is_floating_point(); }
  bool has_positions() const { return input.dim() == 3; }
  template <typename T, typename Number = T>
  math::LossTerms<T, Number> terms() const {
    return options.terms<T, Number>(all_classes ? *all_classes : input.size(1));
  }
  c10::SymInt rows() const {
    return has_positions() ? input.sym_size(0) * input.sym_size(2) : input.sym_size(0);
  }
};

/// Returns the dtype of a loss and its arithmetic: double for double logits, else float.
at::ScalarType loss_dtype(const at::Tensor& input);

/// Throws unless an index target has dtype Long, Int or Byte.
void check_class_dtype(const char* op, const at::Tensor& target);

/// Throws for arguments that kernels cannot read.
void check_cross_entropy(const char* op, const CrossEntropyArguments& arguments);

/// True if the elements along the last dimension are contiguous.
bool has_contiguous_last_dim(const at::Tensor& rows);

/// True if `rows`, with or without positions, may be overwritten: no two elements share memory.
bool can_be_overwritten(const at::Tensor& rows);

/// Throws for logits that cannot be overwritten with their gradient.
void check_cross_entropy_in_place(const at::Tensor& input);

/// Throws for tensors whose storage was freed: kernels would read it without noticing.
void check_cross_entropy_memory(const CrossEntropyArguments& arguments);
void check_target_memory(const CrossEntropyArguments& arguments);

/// Throws unless `scalar` is absent or one element of this dtype on the logits' device.
void check_cross_entropy_scalar(const char* op, const char* name,
                                const std::optional<at::Tensor>& scalar, at::ScalarType dtype,
                                const at::Tensor& input);

/// Throws unless the tensors have the shapes and dtypes that backward needs.
void check_cross_entropy_backward(const char* op, const CrossEntropyArguments& arguments,
                                  const at::Tensor& grad_output, const at::Tensor& statistics,
                                  const at::Tensor& divisor);

/// The data that forward computes for backward.
enum class ForBackward : int64_t { kNothing, kStatistics, kGradient };

/// Outputs that cross_entropy_forward and linear_cross_entropy_forward share. An output that was
/// not asked for has shape [0].
struct LossOutputs {
  at::Tensor loss;  // [], or [rows] with reduction none
  // [] float: grad_scale, lowered if gradient_limit requires it; 1 if grad_scale is absent, 0,
  // infinite or NaN.
  at::Tensor baked_scale;
  at::Tensor statistics;  // [rows, 4] double: math::RowStatistics
  at::Tensor divisor;     // [] double: the number that the sum of losses is divided by
  at::Tensor lse;         // [rows], like entropy and argmax; these three are the metrics
  at::Tensor entropy;
  at::Tensor argmax;
};

struct CrossEntropyOutputs : LossOutputs {
  at::Tensor grad;  // the gradient of loss · baked_scale, in the shape of input

  auto tie() {
    return std::tie(loss, grad, baked_scale, statistics, divisor, lse, entropy, argmax);
  }
};

struct CrossEntropyInPlaceOutputs {
  at::Tensor loss;
  at::Tensor baked_scale;

  auto tie() { return std::tie(loss, baked_scale); }
};

/// Outputs of the overloads with metrics.
struct LossAndMetrics {
  at::Tensor loss;
  at::Tensor lse;
  at::Tensor entropy;
  at::Tensor argmax;
  at::Tensor correct;

  auto tie() { return std::tie(loss, lse, entropy, argmax, correct); }
};

LossOutputs empty_loss_outputs(const CrossEntropyArguments& arguments, ForBackward for_backward,
                               bool with_metrics);

/// A call of cross_entropy, of any of its overloads.
struct CrossEntropyCall {
  CrossEntropyArguments arguments;
  std::optional<at::Tensor> grad_scale;
  std::optional<at::Tensor> denominator;
  bool with_metrics = false;
  // True if the loss must be differentiable twice: with create_graph, torch's function computes the
  // gradient.
  bool is_twice_differentiable = false;

  static CrossEntropyCall from(const NamedArguments& named);

  CrossEntropyCall on(const at::Tensor& input) const {
    CrossEntropyCall call = *this;
    call.arguments.input = input;
    return call;
  }
};

/// A public call of a loss, reshaped to rows. Derived classes do this in their constructors.
template <typename Call>
class LossRows {
 public:
  const Call& call() const { return call_; }
  const LossOptions& options() const { return call_.arguments.options; }

  /// Reshapes a tensor with one entry per row to the shape of index targets.
  at::Tensor shaped(const at::Tensor& of_rows) const {
    return shape_.size() == 1 ? of_rows : of_rows.reshape_symint(shape_);
  }
  at::Tensor shaped_loss(const at::Tensor& loss) const {
    return options().is_per_row() ? shaped(loss) : loss;
  }

 protected:
  explicit LossRows(Call as_passed) : call_(std::move(as_passed)) {}

  Call call_;
  std::vector<c10::SymInt> shape_;  // of index targets
};

/// Logits have shape [classes], [batch, classes] or [batch, classes, d1, ...]. Other tensors are
/// converted to the form that kernels read.
class CrossEntropyRows : public LossRows<CrossEntropyCall> {
 public:
  explicit CrossEntropyRows(CrossEntropyCall as_passed);
};

/// Call the operators that take rows; cross_entropy_in_place() calls cross_entropy_.
CrossEntropyOutputs cross_entropy_forward(const CrossEntropyCall& call, ForBackward for_backward);
CrossEntropyInPlaceOutputs cross_entropy_in_place(const CrossEntropyCall& call);
at::Tensor cross_entropy_backward(const at::Tensor& grad_output,
                                  const CrossEntropyArguments& arguments,
                                  const at::Tensor& statistics, const at::Tensor& divisor);
void cross_entropy_rescale_(const at::Tensor& grad, const at::Tensor& baked_scale,
                            const at::Tensor& grad_output);

/// The functions that a backend implements. They fill the gradient, statistics and metrics whose
/// tensors in `outputs` are not empty. The gradient may share the memory of the logits, and may be
/// 16-bit for float logits.
struct CrossEntropyKernels {
  /// Sets `total`, one double, to the sum of the targets' weights, or with probabilities to the
  /// number of rows. For a target out of range, this or a later call throws. The logits are not
  /// read.
  void (*weigh)(const CrossEntropyArguments& arguments, const at::Tensor& total);
  void (*forward)(const CrossEntropyArguments& arguments,
                  const std::optional<at::Tensor>& grad_scale,
                  const std::optional<at::Tensor>& denominator, const CrossEntropyOutputs& outputs);
  void (*backward)(const CrossEntropyArguments& arguments, const at::Tensor& grad_output,
                   const at::Tensor& statistics, const at::Tensor& divisor, const at::Tensor& grad);
  void (*rescale)(const at::Tensor& grad, const at::Tensor& baked_scale,
                  const at::Tensor& grad_output);
  /// True if a 16-bit gradient may overwrite float logits. Each of its rows then starts where the
  /// logits of that row start.
  bool narrows_in_place = false;
};

extern const CrossEntropyKernels kCrossEntropyCpu;
extern const CrossEntropyKernels kCrossEntropyCuda;

}  // namespace ampfuse
