// Cross-entropy as its kernels see it: rows of logits, whatever shape they came in.
#pragma once

#include <ATen/core/Reduction.h>
#include <ATen/core/Tensor.h>

#include <optional>
#include <tuple>
#include <vector>

namespace ampfuse {

struct CrossEntropyArguments {
  at::Tensor input;                  // [rows, classes], classes next to each other
  at::Tensor target;                 // [rows] indices, or [rows, classes] probabilities
  std::optional<at::Tensor> weight;  // [classes], of the dtype of the arithmetic
  int64_t reduction;
  int64_t ignore_index;
  double label_smoothing;
  double z_loss;
  std::optional<double> softcap;

  bool has_probabilities() const { return target.is_floating_point(); }
};

/// What a loss is computed in, and comes in: double for double logits, else float.
at::ScalarType loss_dtype(const at::Tensor& input);

/// Refuses targets that are neither classes nor probabilities, which these are not.
void check_class_dtype(const char* op, const at::Tensor& target);

/// Refuses what kernels could not read.
void check_cross_entropy(const char* op, const CrossEntropyArguments& arguments);

/// Whether what is in a row are neighbours in memory.
bool is_row_major(const at::Tensor& matrix);

/// Whether this is a matrix that may be overwritten: rows of neighbours, each with its own memory.
bool has_memory_of_its_own(const at::Tensor& matrix);

/// Refuses logits that could not be overwritten with their gradient.
void check_cross_entropy_in_place(const at::Tensor& input);

/// Refuses tensors whose storage was freed under them: they would be read all the same.
void check_cross_entropy_memory(const CrossEntropyArguments& arguments);

/// Refuses anything but one number of this dtype on the logits' device.
void check_cross_entropy_scalar(const char* op, const char* name,
                                const std::optional<at::Tensor>& scalar, at::ScalarType dtype,
                                const at::Tensor& input);

/// loss: [] or, with reduction none, [rows].
/// grad: [rows, classes] if asked for: of the loss, times `baked`.
/// baked: [] float: grad_scale, or 1 where that is 0 or not finite.
/// statistics: [rows, 4] double: math::RowStatistics, for backward; [0] where there is a grad.
/// divisor: [] double: what the sum of losses is divided by.
/// lse, entropy, argmax: [rows] if metrics are asked for.
/// What is not asked for is [0].
using CrossEntropyOutputs = std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor, at::Tensor,
                                       at::Tensor, at::Tensor, at::Tensor>;
CrossEntropyOutputs empty_cross_entropy_outputs(const CrossEntropyArguments& arguments,
                                                const at::Tensor& grad, bool with_metrics);
at::Tensor empty_cross_entropy_grad(const CrossEntropyArguments& arguments, bool with_grad);

struct CrossEntropyCall {
  CrossEntropyArguments arguments;
  std::optional<at::Tensor> grad_scale;
  std::optional<at::Tensor> denominator;
  bool with_metrics = false;

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
  CrossEntropyRows(CrossEntropyArguments as_passed, const std::optional<at::Tensor>& grad_scale,
                   const std::optional<at::Tensor>& denominator, bool with_metrics);

  const CrossEntropyCall& call() const { return call_; }

  /// What there is one of per row, in the shape of index targets.
  at::Tensor shaped(const at::Tensor& of_rows) const;
  at::Tensor shaped_loss(const at::Tensor& loss) const;

 private:
  CrossEntropyCall call_;
  std::vector<c10::SymInt> shape_;
};

/// The operators below autograd.
CrossEntropyOutputs cross_entropy_forward(const CrossEntropyCall& call, bool with_grad);
std::tuple<at::Tensor, at::Tensor> cross_entropy_in_place(const CrossEntropyCall& call);
at::Tensor cross_entropy_backward(const at::Tensor& grad_output,
                                  const CrossEntropyArguments& arguments,
                                  const at::Tensor& statistics, const at::Tensor& divisor);
void cross_entropy_rescale_(const at::Tensor& grad, const at::Tensor& baked,
                            const at::Tensor& grad_output);

}  // namespace ampfuse
