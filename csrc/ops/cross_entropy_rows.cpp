// Converts the arguments of cross_entropy to rows of logits, and defines the public functions.
#include <ATen/core/dispatch/Dispatcher.h>
#include <ampfuse/cross_entropy.h>

#include <utility>

#include "../tensors/dtype_name.h"
#include "../tensors/tensor_list.h"
#include "cross_entropy.h"
#include "cross_entropy_inputs.h"
#include "named_arguments.h"

namespace ampfuse {

namespace {

// Logits with fewer positions are copied to rows: they would fill too few lanes of a vector or
// warp.
constexpr int64_t kFewestPositions = 16;
// Logits whose classes outnumber their positions by more than this factor are copied too: one
// thread reads all classes of a position, or of a few positions.
constexpr int64_t kMostClassesOfPosition = 16;

// Returns the number of positions: d1 · d2 · ... of [batch, classes, d1, d2, ...].
c10::SymInt positions_of(const at::Tensor& tensor) {
  c10::SymInt positions = 1;
  for (int64_t d = 2; d < tensor.dim(); ++d) positions *= tensor.sym_size(d);
  return positions;
}

// True if the logits are read in place although the classes of a row are far apart in memory. This
// does not depend on the size of the batch, because no result may depend on it.
bool are_read_by_position(const at::Tensor& tensor) {
  if (tensor.dim() < 3 || tensor.sym_stride(1) == 1) return false;
  const c10::SymInt positions = positions_of(tensor);
  return positions >= kFewestPositions && tensor.sym_size(1) <= kMostClassesOfPosition * positions;
}

// Reshapes [batch, classes, d1, ...] to [rows, classes], or to [batch, classes, positions] if
// `by_position`. Copies only if no such view has a contiguous last dimension.
at::Tensor rows_of(const at::Tensor& tensor, bool by_position) {
  if (by_position) {
    const at::Tensor positions =
        tensor.reshape_symint({tensor.sym_size(0), tensor.sym_size(1), positions_of(tensor)});
    return has_contiguous_last_dim(positions) ? positions : positions.contiguous();
  }
  // Most logits are rows already. A view of them would add a node to the graph.
  if (tensor.dim() == 2) return has_contiguous_last_dim(tensor) ? tensor : tensor.contiguous();
  const at::Tensor last = tensor.dim() == 1 ? tensor.unsqueeze(0) : tensor.movedim(1, -1);
  const c10::SymInt classes = last.sym_size(-1);
  c10::SymInt rows = 1;
  for (int64_t d = 0; d < last.dim() - 1; ++d) rows *= last.sym_size(d);
  const at::Tensor matrix = last.reshape_symint({rows, classes});
  return has_contiguous_last_dim(matrix) ? matrix : matrix.contiguous();
}

// Returns a hint for logits [batch, positions, classes] with targets [batch, positions]: torch's
// order is [batch, classes, positions].
const char* classes_last_hint(const at::Tensor& input, const at::Tensor& target) {
  const bool are_last = input.dim() > 2 && target.dim() == input.dim() - 1 &&
                        target.sym_sizes() == input.sym_sizes().slice(0, target.dim());
  return are_last ? "; classes are dimension 1: pass logits.flatten(0, -2) and target.flatten()"
                  : "";
}

void check_loss_layout(const char* name, const at::Tensor& tensor) {
  TORCH_CHECK_VALUE(tensor.layout() == at::kStrided && !tensor.is_nested(), kCrossEntropy, ": ",
                    name, ": expected a strided tensor, got ",
                    tensor.is_nested() ? "a nested one of layout " : "layout ", tensor.layout());
  check_memory(kCrossEntropy, name, tensor);  // it may be copied to rows
}

void check_shapes(const at::Tensor& input, const at::Tensor& target,
                  const std::vector<c10::SymInt>& shape) {
  if (target.is_floating_point()) {
    TORCH_CHECK_VALUE(target.sym_sizes() == input.sym_sizes(), kCrossEntropy,
                      ": target: expected indices (int64, int32 or uint8), or probabilities of the "
                      "shape of input, ",
                      input.sym_sizes(), ", got ", dtype_name(target.scalar_type()), " of shape ",
                      target.sym_sizes());
    return;
  }
  check_class_dtype(kCrossEntropy, target);
  // torch also accepts a target of shape [1] for a single row.
  if (input.dim() == 1 && target.dim() == 1 && target.sym_size(0) == 1) return;
  TORCH_CHECK_VALUE(input.dim() < 2 || target.dim() < 1 || target.sym_size(0) == input.sym_size(0),
                    kCrossEntropy, ": Expected input batch_size (", input.sym_size(0),
                    ") to match target batch_size (", target.sym_size(0), ").");
  TORCH_CHECK_VALUE(target.sym_sizes() == c10::SymIntArrayRef(shape), kCrossEntropy,
                    ": Expected target size ", c10::SymIntArrayRef(shape), ", got ",
                    target.sym_sizes(), classes_last_hint(input, target));
}

}  // namespace

CrossEntropyRows::CrossEntropyRows(CrossEntropyCall as_passed) : LossRows(std::move(as_passed)) {
  CrossEntropyArguments& arguments = call_.arguments;
  const at::Tensor& input = arguments.input;
  check_loss_layout("input", input);
  check_loss_layout("target", arguments.target);
  TORCH_CHECK_VALUE(input.dim() > 0, kCrossEntropy,
                    ": input: expected logits of shape [classes], [batch, classes] or "
                    "[batch, classes, d1, ...], got a single number");
  arguments.options.check_denominator(kCrossEntropy, call_.denominator.has_value());
  shape_ = input.sym_sizes().vec();
  shape_.erase(shape_.begin() + (input.dim() > 1 ? 1 : 0));
  check_shapes(input, arguments.target, shape_);
  call_.grad_scale =
      loss_scalar(kCrossEntropy, "grad_scale", call_.grad_scale, at::kFloat, input.device());
  call_.denominator =
      loss_scalar(kCrossEntropy, "denominator", call_.denominator, at::kDouble, input.device());
  arguments.weight = loss_class_weight(kCrossEntropy, "weight", arguments.weight,
                                       input.sym_size(input.dim() == 1 ? 0 : 1), loss_dtype(input),
                                       input.device());
  const bool by_position = are_read_by_position(input);
  if (arguments.has_probabilities()) {
    arguments.target =
        rows_of(readable_probabilities(arguments.target, loss_dtype(input)), by_position);
  } else {
    if (arguments.target.dim() != 1) arguments.target = arguments.target.reshape({-1});
    arguments.target = arguments.target.contiguous();
  }
  arguments.input = rows_of(input, by_position);
  check_cross_entropy(kCrossEntropy, arguments);
}

// --- the public functions ------------------------------------------------------------------------

namespace {

torch::jit::Stack call_operator(const c10::OperatorHandle& op, const at::Tensor& input,
                                const at::Tensor& target, const CrossEntropyOptions& options) {
  NamedValues values = loss_options(kCrossEntropy, options).named();
  values.emplace_back("input", input);
  values.emplace_back("target", target);
  values.emplace_back("weight", options.weight());
  values.emplace_back("grad_scale", options.grad_scale());
  values.emplace_back("denominator", options.denominator());
  return call_by_name(op, std::move(values));
}

}  // namespace

at::Tensor cross_entropy(const at::Tensor& input, const at::Tensor& target,
                         const CrossEntropyOptions& options) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("ampfuse::cross_entropy", "");
  return call_operator(op, input, target, options)[0].toTensor();
}

CrossEntropyWithMetrics cross_entropy_with_metrics(const at::Tensor& input,
                                                   const at::Tensor& target,
                                                   const CrossEntropyOptions& options) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("ampfuse::cross_entropy", "metrics");
  auto [loss, lse, entropy, argmax, correct] =
      results_of<LossAndMetrics>(call_operator(op, input, target, options));
  return {loss, {lse, entropy, argmax, correct}};
}

at::Tensor cross_entropy_(at::Tensor& input, const at::Tensor& target,
                          const CrossEntropyOptions& options) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("ampfuse::cross_entropy_", "");
  return call_operator(op, input, target, options)[0].toTensor();
}

}  // namespace ampfuse
