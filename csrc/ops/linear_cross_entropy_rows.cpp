// Converts the arguments of linear_cross_entropy to rows, and defines the public functions.
#include <ATen/MemoryOverlap.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ampfuse/linear_cross_entropy.h>
#include <c10/core/GradMode.h>

#include <utility>

#include "../tensors/dtype_name.h"
#include "../tensors/tensor_list.h"
#include "cross_entropy_inputs.h"
#include "linear_cross_entropy.h"
#include "named_arguments.h"

namespace ampfuse {

namespace {

using OptionalTensor = std::optional<at::Tensor>;

std::vector<c10::SymInt> shape_of_rows(const at::Tensor& hidden) {
  TORCH_CHECK_VALUE(hidden.dim() > 0, kLinearCrossEntropy,
                    ": hidden: expected [..., features], got a single number");
  std::vector<c10::SymInt> shape = hidden.sym_sizes().vec();
  shape.pop_back();
  return shape;
}

// Returns the dtype that hidden, weight and bias share, or that of autocast, which does not cast
// doubles.
at::ScalarType dtype_of_products(const LinearCrossEntropyArguments& inputs) {
  const auto& [hidden, weight] = std::tie(inputs.hidden, inputs.weight);
  const OptionalTensor& bias = inputs.bias;
  const bool is_double = hidden.scalar_type() == at::kDouble || weight.scalar_type() == at::kDouble;
  const at::DeviceType device = hidden.device().type();
  if ((hidden.is_cpu() || hidden.is_cuda()) && !is_double &&
      at::autocast::is_autocast_enabled(device)) {
    return at::autocast::get_autocast_dtype(device);
  }
  TORCH_CHECK_TYPE(weight.scalar_type() == hidden.scalar_type() &&
                       (!bias || bias->scalar_type() == hidden.scalar_type()),
                   kLinearCrossEntropy,
                   ": expected hidden, weight and bias of one dtype, or autocast, got hidden of ",
                   dtype_name(hidden.scalar_type()), ", weight of ",
                   dtype_name(weight.scalar_type()),
                   bias ? ", bias of " + dtype_name(bias->scalar_type()) : "");
  return hidden.scalar_type();
}

// Returns the dtype of logits that is asked for, or the default. On a GPU, 16-bit logits and their
// gradient take 2 bytes instead of 6. A CPU stores products as floats anyway, and the kernels of
// shards read floats.
at::ScalarType dtype_of_logits(const LinearCrossEntropyArguments& inputs, at::ScalarType dtype) {
  if (inputs.logits_dtype == at::ScalarType::Undefined) {
    return inputs.hidden.is_cuda() && !inputs.has_shards() ? dtype : accumulate_dtype(dtype);
  }
  return inputs.logits_dtype;
}

// Returns the dtype of the weight's gradient. It is rounded to bfloat16 if `dtype` and
// weight.grad_dtype() are bfloat16 and it is not accumulated: bfloat16 has the range of the float
// sum. fp16 lacks the range for gradients that are not scaled yet.
at::ScalarType dtype_of_weight_gradient(const LinearCrossEntropyCall& call, at::ScalarType dtype) {
  const at::Tensor& weight = call.arguments.weight;
  const bool is_wanted = c10::GradMode::is_enabled() && weight.requires_grad();
  const bool is_rounded =
      dtype == at::kBFloat16 && !call.accumulate_into && is_wanted && weight.grad_dtype() == dtype;
  return is_rounded ? dtype : accumulate_dtype(dtype);
}

at::Tensor rows_of_target(const LinearCrossEntropyArguments& inputs, std::vector<c10::SymInt> shape,
                          const c10::SymInt& rows, at::ScalarType loss_dtype) {
  const at::Tensor& target = inputs.target;
  TORCH_CHECK_VALUE(target.device() == inputs.hidden.device(), kLinearCrossEntropy,
                    ": target: expected hidden's device, ", inputs.hidden.device(), ", got ",
                    target.device());
  if (!target.is_floating_point()) {
    check_class_dtype(kLinearCrossEntropy, target);
    // torch also accepts a target of shape [1] for a single row.
    const bool is_single_row = shape.empty() && target.dim() == 1 && target.sym_size(0) == 1;
    TORCH_CHECK_VALUE(is_single_row || target.sym_sizes() == c10::SymIntArrayRef(shape),
                      kLinearCrossEntropy, ": target: expected shape ", c10::SymIntArrayRef(shape),
                      " for hidden states of shape ", inputs.hidden.sym_sizes(), ", got ",
                      target.sym_sizes(),
                      target.dim() == 1 && target.sym_size(0) == inputs.weight.sym_size(0)
                          ? "; are hidden and weight swapped?"
                          : "");
    return target.reshape({-1}).contiguous();
  }
  TORCH_CHECK_VALUE(!(c10::GradMode::is_enabled() && target.requires_grad()), kLinearCrossEntropy,
                    ": target: gradients with respect to probabilities are not supported; detach() "
                    "it or use cross_entropy");
  const c10::SymInt classes = inputs.weight.sym_size(0);
  shape.push_back(classes);
  TORCH_CHECK_VALUE(target.sym_sizes() == c10::SymIntArrayRef(shape), kLinearCrossEntropy,
                    ": target: expected indices (int64, int32 or uint8), or probabilities of "
                    "shape ",
                    c10::SymIntArrayRef(shape), ", got ", dtype_name(target.scalar_type()),
                    " of shape ", target.sym_sizes());
  return readable_probabilities(target, loss_dtype).reshape_symint({rows, classes}).contiguous();
}

// True if the memory from the first to the last element of `a` overlaps that of `b`.
bool overlap(const at::Tensor& a, const at::Tensor& b) {
  if (!a.is_alias_of(b) || a.sym_numel() == 0 || b.sym_numel() == 0) return false;
  const auto range = [](const at::Tensor& tensor) {
    const c10::SymInt item = tensor.itemsize();
    c10::SymInt last = tensor.sym_storage_offset();
    for (int64_t d = 0; d < tensor.dim(); ++d) {
      last = last + (tensor.sym_size(d) - 1) * tensor.sym_stride(d);
    }
    return std::pair(tensor.sym_storage_offset() * item, last * item + item);
  };
  const auto [a_begin, a_end] = range(a);
  const auto [b_begin, b_end] = range(b);
  return a_begin < b_end && b_begin < a_end;
}

void check_accumulate_into(const LinearCrossEntropyCall& call, at::ScalarType loss_dtype) {
  const OptionalTensor& buffer = call.accumulate_into;
  const at::Tensor& weight = call.arguments.weight;
  if (!buffer) return;
  TORCH_CHECK_VALUE(buffer->sym_sizes() == weight.sym_sizes() &&
                        buffer->scalar_type() == loss_dtype && buffer->device() == weight.device(),
                    kLinearCrossEntropy, ": accumulate_into: expected ", dtype_name(loss_dtype),
                    " of shape ", weight.sym_sizes(), " on ", weight.device(), ", got ",
                    dtype_name(buffer->scalar_type()), " of shape ", buffer->sym_sizes(), " on ",
                    buffer->device());
  check_strided(kLinearCrossEntropy, "accumulate_into", *buffer);
  check_memory(kLinearCrossEntropy, "accumulate_into", *buffer);
  TORCH_CHECK_VALUE(at::has_internal_overlap(*buffer) != at::MemOverlap::Yes, kLinearCrossEntropy,
                    ": accumulate_into: expected elements that share no memory, got shape ",
                    buffer->sym_sizes(), " with strides ", buffer->sym_strides());
  for (const at::Tensor& other : {weight, call.arguments.hidden}) {
    TORCH_CHECK_VALUE(
        !overlap(*buffer, other), kLinearCrossEntropy,
        ": accumulate_into: expected memory of its own, got memory that overlaps weight or hidden");
  }
  TORCH_CHECK_VALUE(!buffer->requires_grad(), kLinearCrossEntropy,
                    ": accumulate_into: expected a tensor that does not require grad; detach() it");
  TORCH_CHECK_VALUE(
      !c10::GradMode::is_enabled() || weight.requires_grad(), kLinearCrossEntropy,
      ": accumulate_into: expected a weight that requires grad, got one that does not");
}

}  // namespace

LinearCrossEntropyRows::LinearCrossEntropyRows(LinearCrossEntropyCall as_passed)
    : LossRows(std::move(as_passed)) {
  shape_ = shape_of_rows(call_.arguments.hidden);
  LinearCrossEntropyArguments& arguments = call_.arguments;
  const auto& [hidden, weight] = std::tie(arguments.hidden, arguments.weight);
  TORCH_CHECK_VALUE(weight.dim() == 2, kLinearCrossEntropy,
                    ": weight: expected [classes, features], got shape ", weight.sym_sizes());
  arguments.options.check_denominator(kLinearCrossEntropy, call_.denominator.has_value());
  TORCH_CHECK_VALUE(
      !(call_.with_metrics && arguments.shard && arguments.target.is_floating_point()),
      kLinearCrossEntropy,
      ": target: expected indices, since metrics are not supported for shards of probabilities");
  const at::ScalarType dtype = dtype_of_products(arguments);
  const at::ScalarType loss_dtype = accumulate_dtype(dtype);
  const at::Device device = hidden.device();
  const c10::SymInt rows = c10::multiply_integers(shape_.begin(), shape_.end());
  const c10::SymInt classes =
      arguments.shard ? c10::SymInt(arguments.shard->num_classes) : weight.sym_size(0);
  check_strided(kLinearCrossEntropy, "hidden", hidden);
  check_strided(kLinearCrossEntropy, "weight", weight);
  check_strided(kLinearCrossEntropy, "target", arguments.target);
  if (arguments.bias) check_strided(kLinearCrossEntropy, "bias", *arguments.bias);
  check_memory(kLinearCrossEntropy, "hidden", hidden);
  check_memory(kLinearCrossEntropy, "target", arguments.target);
  arguments.target = rows_of_target(arguments, shape_, rows, loss_dtype);
  arguments.class_weight = loss_class_weight(kLinearCrossEntropy, "class_weight",
                                             arguments.class_weight, classes, loss_dtype, device);
  arguments.dtype = dtype;
  arguments.logits_dtype = dtype_of_logits(arguments, dtype);
  arguments.weight_grad_dtype = dtype_of_weight_gradient(call_, dtype);
  call_.grad_scale =
      loss_scalar(kLinearCrossEntropy, "grad_scale", call_.grad_scale, at::kFloat, device);
  call_.denominator =
      loss_scalar(kLinearCrossEntropy, "denominator", call_.denominator, at::kDouble, device);
  check_accumulate_into(call_, loss_dtype);
  if (hidden.dim() != 2) {
    arguments.hidden = hidden.reshape_symint({rows, hidden.sym_size(-1)});
  }
}

// --- the public functions ------------------------------------------------------------------------

namespace {

torch::jit::Stack call_operator(const c10::OperatorHandle& op, const at::Tensor& hidden,
                                const at::Tensor& weight, const at::Tensor& target,
                                const OptionalTensor& bias,
                                const LinearCrossEntropyOptions& options) {
  NamedValues values = loss_options(kLinearCrossEntropy, options).named();
  for (auto& value : named(options.shard())) values.push_back(std::move(value));
  values.emplace_back("hidden", hidden);
  values.emplace_back("weight", weight);
  values.emplace_back("target", target);
  values.emplace_back("bias", bias);
  values.emplace_back("class_weight", options.class_weight());
  values.emplace_back("grad_scale", options.grad_scale());
  values.emplace_back("denominator", options.denominator());
  values.emplace_back("chunk_rows", options.chunk_rows());
  values.emplace_back("chunk_classes", options.chunk_classes());
  values.emplace_back("logits_dtype", options.logits_dtype());
  values.emplace_back("accumulate_into", options.accumulate_into());
  return call_by_name(op, std::move(values));
}

}  // namespace

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                const at::Tensor& target, const OptionalTensor& bias,
                                const LinearCrossEntropyOptions& options) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("ampfuse::linear_cross_entropy", "");
  return call_operator(op, hidden, weight, target, bias, options)[0].toTensor();
}

CrossEntropyWithMetrics linear_cross_entropy_with_metrics(
    const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
    const OptionalTensor& bias, const LinearCrossEntropyOptions& options) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("ampfuse::linear_cross_entropy", "metrics");
  auto [loss, lse, entropy, argmax, correct] =
      results_of<LossAndMetrics>(call_operator(op, hidden, weight, target, bias, options));
  return {loss, {lse, entropy, argmax, correct}};
}

}  // namespace ampfuse
