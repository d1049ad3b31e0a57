#include "linear_cross_entropy.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <utility>
#include <vector>

#include "../tensors/dtype_name.h"
#include "../tensors/float_dtypes.h"
#include "registration.h"

namespace ampfuse {

namespace {

using OptionalTensor = std::optional<at::Tensor>;

void check_matrix(const char* name, const at::Tensor& matrix, at::Device device) {
  TORCH_CHECK_VALUE(matrix.layout() == at::kStrided && matrix.dim() == 2, kLinearCrossEntropy, ": ",
                    name, ": expected a strided matrix, got ", matrix.layout(), " of shape ",
                    matrix.sym_sizes());
  const at::ScalarType dtype = matrix.scalar_type();
  TORCH_CHECK_TYPE(has_float_kernels(dtype), kLinearCrossEntropy, ": ", name,
                   ": expected float16, bfloat16, float32 or float64, got ", dtype_name(dtype));
  TORCH_CHECK_VALUE(matrix.device() == device, kLinearCrossEntropy, ": ", name,
                    ": expected hidden's device, ", device, ", got ", matrix.device());
}

void check_class_weight_of_all(const LinearCrossEntropyArguments& arguments) {
  const auto& class_weight = arguments.class_weight;
  const int64_t classes = arguments.shard->num_classes;
  TORCH_CHECK_VALUE(
      !class_weight || (class_weight->dim() == 1 && class_weight->sym_size(0) == classes),
      kLinearCrossEntropy, ": class_weight: expected [", classes, "], got ",
      class_weight->sym_sizes());
}

void check_chunk_classes(const LinearCrossEntropyArguments& arguments) {
  if (!arguments.chunk_classes) return;
  TORCH_CHECK_VALUE(*arguments.chunk_classes > 0, kLinearCrossEntropy,
                    ": chunk_classes: expected at least 1, got ", *arguments.chunk_classes);
  TORCH_CHECK_VALUE(
      !arguments.chunk_rows && !arguments.shard && !arguments.options.is_per_row(),
      kLinearCrossEntropy,
      ": chunk_classes: only allowed with reduction=\"mean\" or \"sum\", and neither with "
      "chunk_rows nor with a process group");
}

at::Tensor allocated_if(bool is_wanted, const std::vector<c10::SymInt>& sizes,
                        const at::TensorOptions& options) {
  return is_wanted ? at::empty_symint(sizes, options) : at::empty({0}, options);
}

}  // namespace

CrossEntropyArguments LinearCrossEntropyArguments::loss() const {
  const bool is_whole = !shard || target.is_floating_point();
  const c10::SymInt classes = is_whole ? weight.sym_size(0) : c10::SymInt(shard->num_classes);
  OptionalTensor weights = class_weight;
  if (shard && is_whole && weights) {
    weights = weights->narrow_symint(0, shard->first_class, weight.sym_size(0));
  }
  at::Tensor logits = at::empty({0}, hidden.options().dtype(logits_dtype));
  const std::vector<c10::SymInt> sizes = {hidden.sym_size(0), classes};
  const std::vector<c10::SymInt> strides = {classes, 1};
  logits.unsafeGetTensorImpl()->set_sizes_and_strides(sizes, strides);
  return {logits, target, weights, options};
}

CrossEntropyArguments LinearCrossEntropyArguments::loss_of_shard(
    const std::optional<at::Tensor>& renumbered) const {
  CrossEntropyArguments of_shard = loss();
  of_shard.are_targets_checked = true;
  of_shard.gradient_limit = gradient_limit();
  if (!shard) return of_shard;
  of_shard.all_classes = shard->num_classes;
  if (of_shard.has_probabilities()) return of_shard;
  const int64_t first = shard->first_class;
  const int64_t classes = weight.size(0);
  of_shard.target = renumbered ? *renumbered
                               : targets_of_shards(target, options.ignore_index, first,
                                                   first + classes, classes)[0];
  of_shard.options.ignore_index = kIgnoredTarget;
  if (class_weight) of_shard.weight = class_weight->narrow(0, first, classes);
  return of_shard;
}

at::ScalarType accumulate_dtype(at::ScalarType dtype) {
  return is_16bit(dtype) ? at::kFloat : dtype;
}

void check_logits_dtype(at::ScalarType logits_dtype, at::ScalarType dtype, bool in_shards) {
  const at::ScalarType wide = accumulate_dtype(dtype);
  TORCH_CHECK_TYPE(logits_dtype == wide || !in_shards, kLinearCrossEntropy,
                   ": logits_dtype: expected ", dtype_name(wide),
                   " with a process group or chunk_classes, got ", dtype_name(logits_dtype));
  TORCH_CHECK_TYPE(logits_dtype == wide || logits_dtype == dtype, kLinearCrossEntropy,
                   ": logits_dtype: expected ", dtype == wide ? "" : dtype_name(dtype) + " or ",
                   dtype_name(wide), " for products of ", dtype_name(dtype), ", got ",
                   dtype_name(logits_dtype));
}

void check_linear_cross_entropy(const LinearCrossEntropyArguments& arguments,
                                const OptionalTensor& grad_scale,
                                const OptionalTensor& denominator) {
  const auto& hidden = arguments.hidden;
  const auto& weight = arguments.weight;
  const auto& bias = arguments.bias;
  const auto dtype = arguments.dtype;
  check_matrix("hidden", hidden, hidden.device());
  check_matrix("weight", weight, hidden.device());
  TORCH_CHECK_VALUE(weight.sym_size(1) == hidden.sym_size(1), kLinearCrossEntropy,
                    ": hidden: expected ", weight.sym_size(1), " features, as weight has (",
                    weight.sym_sizes(), "), got ", hidden.sym_size(1),
                    hidden.sym_size(1) == weight.sym_size(0)
                        ? "; are these logits, or is weight not [classes, features]?"
                        : "");
  TORCH_CHECK_VALUE(!bias || (bias->dim() == 1 && bias->sym_size(0) == weight.sym_size(0) &&
                              bias->is_floating_point() && bias->device() == hidden.device()),
                    kLinearCrossEntropy, ": bias: expected [", weight.sym_size(0),
                    "] of a floating dtype on ", hidden.device(), ", got ",
                    dtype_name(bias->scalar_type()), " of shape ", bias->sym_sizes(), " on ",
                    bias->device());
  TORCH_CHECK_TYPE(
      has_float_kernels(dtype), kLinearCrossEntropy,
      ": hidden, weight and bias: expected float16, bfloat16, float32 or float64, or autocast to "
      "one of these, got ",
      dtype_name(dtype));
  check_logits_dtype(arguments.logits_dtype, dtype, arguments.has_shards());
  const auto weight_grad_dtype = arguments.weight_grad_dtype;
  TORCH_CHECK_TYPE(weight_grad_dtype == accumulate_dtype(dtype) ||
                       (dtype == at::kBFloat16 && weight_grad_dtype == dtype),
                   kLinearCrossEntropy, ": weight_grad_dtype: expected ",
                   dtype_name(accumulate_dtype(dtype)),
                   dtype == at::kBFloat16 ? " or bfloat16" : "", " for products of ",
                   dtype_name(dtype), ", got ", dtype_name(weight_grad_dtype));
  TORCH_CHECK_VALUE(!arguments.chunk_rows || *arguments.chunk_rows > 0, kLinearCrossEntropy,
                    ": chunk_rows: expected at least 1, got ", *arguments.chunk_rows);
  check_chunk_classes(arguments);
  if (arguments.shard) check_class_weight_of_all(arguments);
  check_cross_entropy(kLinearCrossEntropy, arguments.loss());
  check_cross_entropy_scalar(kLinearCrossEntropy, "grad_scale", grad_scale, at::kFloat, hidden);
  check_cross_entropy_scalar(kLinearCrossEntropy, "denominator", denominator, at::kDouble, hidden);
}

LinearCrossEntropyGradients empty_linear_gradients(const LinearCrossEntropyArguments& arguments,
                                                   const LinearGradientMask& wanted) {
  const auto options = arguments.hidden.options();
  const auto sums = options.dtype(accumulate_dtype(arguments.dtype));
  return {allocated_if(wanted[0], arguments.hidden.sym_sizes().vec(), options),
          allocated_if(wanted[1], arguments.weight.sym_sizes().vec(),
                       options.dtype(arguments.weight_grad_dtype)),
          allocated_if(wanted[2], {arguments.weight.sym_size(0)}, sums)};
}

LinearCrossEntropyOutputs empty_linear_outputs(const LinearCrossEntropyArguments& arguments,
                                               const LinearGradientMask& wanted,
                                               bool with_metrics) {
  const auto for_backward = arguments.options.is_per_row() && any(wanted) ? ForBackward::kStatistics
                                                                          : ForBackward::kNothing;
  return {empty_loss_outputs(arguments.loss(), for_backward, with_metrics),
          empty_linear_gradients(arguments, {})};
}

// --- calls ---------------------------------------------------------------------------------------

NamedValues LinearCrossEntropyArguments::named_options() const {
  NamedValues values = options.named();
  for (auto& value : named(shard)) values.push_back(std::move(value));
  values.emplace_back("dtype", static_cast<int64_t>(dtype));
  values.emplace_back("logits_dtype", static_cast<int64_t>(logits_dtype));
  values.emplace_back("weight_grad_dtype", static_cast<int64_t>(weight_grad_dtype));
  values.emplace_back("chunk_rows", chunk_rows);
  values.emplace_back("chunk_classes", chunk_classes);
  return values;
}

void LinearCrossEntropyArguments::set_options(const FindValue& find) {
  options = LossOptions::from(find);
  shard = vocab_shard_from(find);
  chunk_rows = find("chunk_rows")->toOptional<int64_t>();
  chunk_classes = find("chunk_classes")->toOptional<int64_t>();
  const auto dtype_of = [&](const char* name) {
    const c10::IValue* const value = find(name);
    return value == nullptr || value->isNone() ? at::ScalarType::Undefined
                                               : static_cast<at::ScalarType>(value->toInt());
  };
  dtype = dtype_of("dtype");
  logits_dtype = dtype_of("logits_dtype");
  weight_grad_dtype = dtype_of("weight_grad_dtype");
}

LinearCrossEntropyArguments LinearCrossEntropyArguments::from(const NamedArguments& named) {
  LinearCrossEntropyArguments arguments = {.hidden = named.tensor("hidden"),
                                           .weight = named.tensor("weight"),
                                           .bias = named.optional_tensor("bias"),
                                           .target = named.tensor("target"),
                                           .class_weight = named.optional_tensor("class_weight")};
  arguments.set_options(values_in(named));
  return arguments;
}

LinearCrossEntropyCall LinearCrossEntropyCall::from(const NamedArguments& named) {
  return {.arguments = LinearCrossEntropyArguments::from(named),
          .grad_scale = named.optional_tensor("grad_scale"),
          .denominator = named.optional_tensor("denominator"),
          .accumulate_into = named.optional_tensor("accumulate_into")};
}

namespace {

// Returns the arguments that forward and backward share.
NamedValues named_arguments(const LinearCrossEntropyArguments& arguments,
                            const LinearGradientMask& wanted) {
  NamedValues values = arguments.named_options();
  values.emplace_back("hidden", arguments.hidden);
  values.emplace_back("weight", arguments.weight);
  values.emplace_back("bias", arguments.bias);
  values.emplace_back("target", arguments.target);
  values.emplace_back("class_weight", arguments.class_weight);
  values.emplace_back("output_mask", std::vector<bool>(wanted.begin(), wanted.end()));
  return values;
}

}  // namespace

LinearCrossEntropyOutputs linear_cross_entropy_forward(const LinearCrossEntropyCall& call,
                                                       const LinearGradientMask& wanted) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("ampfuse::linear_cross_entropy_forward", "");
  NamedValues values = named_arguments(call.arguments, wanted);
  values.emplace_back("grad_scale", call.grad_scale);
  values.emplace_back("denominator", call.denominator);
  values.emplace_back("with_metrics", call.with_metrics);
  return results_of<LinearCrossEntropyOutputs>(call_by_name(op, std::move(values)));
}

LinearCrossEntropyGradients linear_cross_entropy_backward(
    const at::Tensor& grad_output, const LinearCrossEntropyArguments& arguments,
    const at::Tensor& statistics, const at::Tensor& divisor, const LinearGradientMask& wanted) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("ampfuse::linear_cross_entropy_backward", "");
  NamedValues values = named_arguments(arguments, wanted);
  values.emplace_back("grad_output", grad_output);
  values.emplace_back("statistics", statistics);
  values.emplace_back("divisor", divisor);
  return results_of<LinearCrossEntropyGradients>(call_by_name(op, std::move(values)));
}

AMPFUSE_OPERATORS(m) {
  // The public operators, composed of those below.
  m.def(
      "linear_cross_entropy(Tensor hidden, Tensor weight, Tensor target, Tensor? bias=None, *, "
      "Tensor? class_weight=None, int reduction=1, int ignore_index=-100, "
      "float label_smoothing=0.0, Tensor? grad_scale=None, Tensor? denominator=None, "
      "float z_loss=0.0, float? softcap=None, int? chunk_rows=None, int? chunk_classes=None, "
      "ScalarType? logits_dtype=None, "
      "Tensor? accumulate_into=None, str? group=None, int[]? vocab_shard=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "linear_cross_entropy.metrics(Tensor hidden, Tensor weight, Tensor target, "
      "Tensor? bias=None, *, Tensor? class_weight=None, int reduction=1, int ignore_index=-100, "
      "float label_smoothing=0.0, Tensor? grad_scale=None, Tensor? denominator=None, "
      "float z_loss=0.0, float? softcap=None, int? chunk_rows=None, int? chunk_classes=None, "
      "ScalarType? logits_dtype=None, "
      "Tensor? accumulate_into=None, str? group=None, int[]? vocab_shard=None) -> "
      "(Tensor loss, Tensor lse, Tensor entropy, Tensor argmax, Tensor correct)",
      {at::Tag::pt2_compliant_tag});
  // These operators take rows, and multiply in `dtype`. `vocab_shard`, for a group of ranks, is
  // [group_size, first_class, num_classes]. Dtypes are c10's integers: in a package that was
  // compiled ahead of time, a ScalarType arrives as another dtype (torch 2.11).
  m.def(
      "linear_cross_entropy_forward(Tensor hidden, Tensor weight, Tensor? bias, Tensor target, "
      "Tensor? class_weight, int reduction, int ignore_index, float label_smoothing, "
      "Tensor? grad_scale, Tensor? denominator, float z_loss, float? softcap, int dtype, "
      "int logits_dtype, int weight_grad_dtype, int? chunk_rows, int? chunk_classes, str? group, "
      "int[]? vocab_shard, "
      "bool[3] output_mask, bool with_metrics) -> (Tensor loss, Tensor grad_hidden, "
      "Tensor grad_weight, Tensor grad_bias, Tensor baked_scale, Tensor statistics, "
      "Tensor divisor, Tensor lse, Tensor entropy, Tensor argmax)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "linear_cross_entropy_backward(Tensor grad_output, Tensor hidden, Tensor weight, "
      "Tensor? bias, Tensor target, Tensor? class_weight, Tensor statistics, Tensor divisor, "
      "int reduction, int ignore_index, float label_smoothing, float z_loss, float? softcap, "
      "int dtype, int logits_dtype, int weight_grad_dtype, int? chunk_rows, int? chunk_classes, "
      "str? group, "
      "int[]? vocab_shard, bool[3] output_mask) -> (Tensor grad_hidden, Tensor grad_weight, Tensor "
      "grad_bias)",
      {at::Tag::pt2_compliant_tag});
}

}  // namespace ampfuse
