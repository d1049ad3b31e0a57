// Cross-entropy as its kernels see it: rows of logits, whatever shape they came in. Where classes
// are far apart, as in [batch, classes, height, width], the rows of a batch's entry lie beside each
// other: they are its places.
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
  // [rows, classes], classes next to each other; or [batch, classes, places], places next to each
  // other, whose rows are [batch · places].
  at::Tensor input;
  at::Tensor target;                 // [rows] indices, or probabilities of the shape of input
  std::optional<at::Tensor> weight;  // [classes], of the dtype of the arithmetic
  LossOptions options = {};
  // Targets were validated as part of a larger batch, and `denominator` holds their total weight.
  bool is_weighed = false;
  // The number of classes of all shards, where those here are a shard: then math::kElsewhere may be
  // a target.
  std::optional<int64_t> all_classes = {};
  // Upper bound on |grad_scale / divisor|. A larger grad_scale is lowered by powers of two
  // (math::baked_scale).
  float gradient_limit = HUGE_VALF;

  /// The arguments that all overloads and the operators below autograd have.
  static CrossEntropyArguments from(const NamedArguments& named);

  bool has_probabilities() const { return target.is_floating_point(); }
  bool has_places() const { return input.dim() == 3; }
  template <typename T, typename Number = T>
  math::LossTerms<T, Number> terms() const {
    return options.terms<T, Number>(all_classes ? *all_classes : input.size(1));
  }
  c10::SymInt rows() const {
    return has_places() ? input.sym_size(0) * input.sym_size(2) : input.sym_size(0);
  }
};

/// What a loss is computed in, and comes in: double for double logits, else float.
at::ScalarType loss_dtype(const at::Tensor& input);

/// Refuses targets that are neither classes nor probabilities, which these are not.
void check_class_dtype(const char* op, const at::Tensor& target);

/// Refuses what kernels could not read.
void check_cross_entropy(const char* op, const CrossEntropyArguments& arguments);

/// Whether what is along the last dimension are neighbours in memory.
bool has_neighbours(const at::Tensor& rows);

/// Whether these are rows, or rows in places, that may be overwritten: each with its own memory.
bool has_memory_of_its_own(const at::Tensor& rows);

/// Refuses logits that could not be overwritten with their gradient.
void check_cross_entropy_in_place(const at::Tensor& input);

/// Refuses tensors whose storage was freed under them: they would be read all the same.
void check_cross_entropy_memory(const CrossEntropyArguments& arguments);
void check_target_memory(const CrossEntropyArguments& arguments);
void check_memory(const char* op, const char* name, const at::Tensor& tensor);

/// Refuses anything but one number of this dtype on the logits' device.
void check_cross_entropy_scalar(const char* op, const char* name,
                                const std::optional<at::Tensor>& scalar, at::ScalarType dtype,
                                const at::Tensor& input);

/// Refuses what forward did not leave for backward.
void check_cross_entropy_backward(const char* op, const CrossEntropyArguments& arguments,
                                  const at::Tensor& grad_output, const at::Tensor& statistics,
                                  const at::Tensor& divisor);

/// What forward computes for backward.
enum class ForBackward : int64_t { kNothing, kStatistics, kGradient };

/// What both losses return. An output that was not asked for has shape [0].
struct LossOutputs {
  at::Tensor loss;         // [], or [rows] with reduction none
  at::Tensor baked_scale;  // [] float: grad_scale, lowered to gradient_limit; 1 if 0 or not finite
  at::Tensor statistics;   // [rows, 4] double: math::RowStatistics
  at::Tensor divisor;      // [] double: what the sum of losses is divided by
  at::Tensor lse;          // [rows], as entropy and argmax: metrics
  at::Tensor entropy;
  at::Tensor argmax;
};

struct CrossEntropyOutputs : LossOutputs {
  at::Tensor grad;  // of the loss times baked_scale; the shape of input

  auto tie() {
    return std::tie(loss, grad, baked_scale, statistics, divisor, lse, entropy, argmax);
  }
};

struct CrossEntropyInPlaceOutputs {
  at::Tensor loss;
  at::Tensor baked_scale;

  auto tie() { return std::tie(loss, baked_scale); }
};

/// What the overloads with metrics return.
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
  // The second derivative is that of torch's function.
  bool is_twice_differentiable = false;

  static CrossEntropyCall from(const NamedArguments& named);

  CrossEntropyCall on(const at::Tensor& input) const {
    CrossEntropyCall call = *this;
    call.arguments.input = input;
    return call;
  }
};

/// What people pass, as rows: logits of shape [classes], [batch, classes] or
/// [batch, classes, d1, ...], targets to match, tensors of any dtype and device that can be used.
class CrossEntropyRows {
 public:
  explicit CrossEntropyRows(CrossEntropyCall as_passed);

  const CrossEntropyCall& call() const { return call_; }
  const LossOptions& options() const { return call_.arguments.options; }

  /// What there is one of per row, in the shape of index targets.
  at::Tensor shaped(const at::Tensor& of_rows) const;
  at::Tensor shaped_loss(const at::Tensor& loss) const;

 private:
  CrossEntropyCall call_;
  std::vector<c10::SymInt> shape_;
};

/// The operators below autograd.
CrossEntropyOutputs cross_entropy_forward(const CrossEntropyCall& call, ForBackward for_backward);
CrossEntropyInPlaceOutputs cross_entropy_in_place(const CrossEntropyCall& call);
at::Tensor cross_entropy_backward(const at::Tensor& grad_output,
                                  const CrossEntropyArguments& arguments,
                                  const at::Tensor& statistics, const at::Tensor& divisor);
void cross_entropy_rescale_(const at::Tensor& grad, const at::Tensor& baked_scale,
                            const at::Tensor& grad_output);

/// The functions that a backend implements. They fill those of the gradient, statistics and metrics
/// whose tensors in `outputs` are not empty. The gradient may share the memory of the logits, and
/// the gradient of float logits may have 16 bits.
struct CrossEntropyKernels {
  /// Sets `total`, one double, to the sum of the targets' weights. Targets out of range raise an
  /// error, here or in a later call. The logits are not read.
  void (*weigh)(const CrossEntropyArguments& arguments, const at::Tensor& total);
  void (*forward)(const CrossEntropyArguments& arguments,
                  const std::optional<at::Tensor>& grad_scale,
                  const std::optional<at::Tensor>& denominator, const CrossEntropyOutputs& outputs);
  void (*backward)(const CrossEntropyArguments& arguments, const at::Tensor& grad_output,
                   const at::Tensor& statistics, const at::Tensor& divisor, const at::Tensor& grad);
  void (*rescale)(const at::Tensor& grad, const at::Tensor& baked_scale,
                  const at::Tensor& grad_output);
  /// Whether a 16-bit gradient may overwrite float logits, each of its rows starting where the
  /// logits of that row start.
  bool narrows_in_place = false;
};

/// The backends.
extern const CrossEntropyKernels kCrossEntropyCpu;
extern const CrossEntropyKernels kCrossEntropyCuda;

}  // namespace ampfuse
