// From what people pass to rows of hidden states, and the public functions.
#include <ATen/MemoryOverlap.h>
#include <ATen/autocast_mode.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ampfuse/linear_cross_entropy.h>
#include <c10/core/GradMode.h>

#include <string>
#include <utility>

#include "cross_entropy_inputs.h"
#include "linear_cross_entropy.h"

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

// One dtype for all that logits are made of, or that of autocast, which leaves doubles alone.
at::ScalarType dtype_of_products(const LinearCrossEntropyInputs& inputs) {
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
                   hidden.scalar_type(), ", weight of ", weight.scalar_type(),
                   bias ? std::string(", bias of ") + at::toString(bias->scalar_type()) : "");
  return hidden.scalar_type();
}

// The weight is given its gradient in the dtype of the products where it asks for no other, and
// these have the range of the sum: what half has of one that is not scaled as it will be has not.
at::ScalarType dtype_of_weight_gradient(const LinearCrossEntropyInputs& inputs,
                                        at::ScalarType dtype) {
  const bool has_buffer = inputs.accumulate_into && inputs.accumulate_into->defined();
  const bool is_rounded =
      dtype == at::kBFloat16 && !has_buffer && inputs.weight.grad_dtype() == dtype;
  return is_rounded ? dtype : accumulate_dtype(dtype);
}

at::Tensor rows_of_target(const LinearCrossEntropyInputs& inputs, std::vector<c10::SymInt> shape,
                          const c10::SymInt& rows, at::ScalarType loss_dtype) {
  const at::Tensor& target = inputs.target;
  TORCH_CHECK_VALUE(target.device() == inputs.hidden.device(), kLinearCrossEntropy,
                    ": target: expected device ", inputs.hidden.device(), " as hidden, got ",
                    target.device());
  if (!target.is_floating_point()) {
    check_class_dtype(kLinearCrossEntropy, target);
    // torch takes one index in a list for a single row, too.
    const bool is_in_list = shape.empty() && target.dim() == 1 && target.sym_size(0) == 1;
    TORCH_CHECK_VALUE(is_in_list || target.sym_sizes() == c10::SymIntArrayRef(shape),
                      kLinearCrossEntropy, ": target: expected shape ", c10::SymIntArrayRef(shape),
                      " for hidden states of shape ", inputs.hidden.sym_sizes(), ", got ",
                      target.sym_sizes());
    return target.reshape({-1}).contiguous();
  }
  TORCH_CHECK_VALUE(!(c10::GradMode::is_enabled() && target.requires_grad()), kLinearCrossEntropy,
                    ": target: has no derivative here: cross_entropy has");
  const c10::SymInt classes = inputs.weight.sym_size(0);
  shape.push_back(classes);
  TORCH_CHECK_VALUE(target.sym_sizes() == c10::SymIntArrayRef(shape), kLinearCrossEntropy,
                    ": target: expected indices (int64, int32 or uint8), or probabilities of "
                    "shape ",
                    c10::SymIntArrayRef(shape), ", got ", target.scalar_type(), " of shape ",
                    target.sym_sizes());
  return readable_probabilities(target, loss_dtype).reshape_symint({rows, classes}).contiguous();
}

// Whether they may have memory in common: what is between the first number and the last.
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

OptionalTensor checked_buffer(const LinearCrossEntropyInputs& inputs, at::ScalarType loss_dtype) {
  const OptionalTensor& buffer = inputs.accumulate_into;
  const at::Tensor& weight = inputs.weight;
  if (!buffer || !buffer->defined()) return std::nullopt;
  TORCH_CHECK_VALUE(buffer->sym_sizes() == weight.sym_sizes() &&
                        buffer->scalar_type() == loss_dtype && buffer->device() == weight.device(),
                    kLinearCrossEntropy, ": accumulate_into: expected ", loss_dtype, " of shape ",
                    weight.sym_sizes(), " on ", weight.device(), ", got ", buffer->scalar_type(),
                    " of shape ", buffer->sym_sizes(), " on ", buffer->device());
  TORCH_CHECK_VALUE(
      buffer->layout() == at::kStrided && at::has_internal_overlap(*buffer) != at::MemOverlap::Yes,
      kLinearCrossEntropy, ": accumulate_into: expected strided memory of its own, got ",
      buffer->layout());
  for (const at::Tensor& other : {weight, inputs.hidden}) {
    TORCH_CHECK_VALUE(!overlap(*buffer, other), kLinearCrossEntropy,
                      ": accumulate_into: is memory of the weight or the hidden states");
  }
  TORCH_CHECK_VALUE(!buffer->requires_grad(), kLinearCrossEntropy,
                    ": accumulate_into: expected a tensor that does not require grad");
  TORCH_CHECK_VALUE(!c10::GradMode::is_enabled() || weight.requires_grad(), kLinearCrossEntropy,
                    ": accumulate_into: the weight does not require grad");
  return buffer;
}

}  // namespace

LinearCrossEntropyRows::LinearCrossEntropyRows(const LinearCrossEntropyInputs& inputs,
                                               bool with_metrics)
    : shape_(shape_of_rows(inputs.hidden)) {
  const auto& [hidden, weight] = std::tie(inputs.hidden, inputs.weight);
  TORCH_CHECK_VALUE(weight.dim() == 2, kLinearCrossEntropy,
                    ": weight: expected [classes, features], got shape ", weight.sym_sizes());
  TORCH_CHECK_VALUE(!inputs.denominator || inputs.reduction == at::Reduction::Mean,
                    kLinearCrossEntropy, ": denominator: is for reduction mean");
  TORCH_CHECK_VALUE(!(with_metrics && inputs.shard && inputs.target.is_floating_point()),
                    kLinearCrossEntropy,
                    ": metrics: expected indices as targets, got a shard of probabilities");
  const at::ScalarType dtype = dtype_of_products(inputs);
  const at::ScalarType loss_dtype = accumulate_dtype(dtype);
  const at::Device device = hidden.device();
  const c10::SymInt rows = c10::multiply_integers(shape_.begin(), shape_.end());
  const c10::SymInt classes =
      inputs.shard ? c10::SymInt(inputs.shard->num_classes) : weight.sym_size(0);
  call_ = {
      {hidden.dim() == 2 ? hidden : hidden.reshape_symint({rows, hidden.sym_size(-1)}), weight,
       inputs.bias && inputs.bias->defined() ? inputs.bias : std::nullopt,
       rows_of_target(inputs, shape_, rows, loss_dtype),
       loss_class_weight(kLinearCrossEntropy, "class_weight", inputs.class_weight, classes,
                         loss_dtype, device),
       inputs.reduction, inputs.ignore_index, inputs.label_smoothing, inputs.z_loss, inputs.softcap,
       dtype, dtype_of_weight_gradient(inputs, dtype), inputs.chunk_rows, inputs.shard},
      loss_number(kLinearCrossEntropy, "grad_scale", inputs.grad_scale, at::kFloat, device),
      loss_number(kLinearCrossEntropy, "denominator", inputs.denominator, at::kDouble, device),
      checked_buffer(inputs, loss_dtype),
      with_metrics};
}

at::Tensor LinearCrossEntropyRows::shaped(const at::Tensor& of_rows) const {
  return shape_.size() == 1 ? of_rows : of_rows.reshape_symint(shape_);
}

at::Tensor LinearCrossEntropyRows::shaped_loss(const at::Tensor& loss) const {
  return call_.arguments.reduction == at::Reduction::None ? shaped(loss) : loss;
}

// --- the public functions ------------------------------------------------------------------------

namespace {

template <typename Result>
auto find(const char* overload) {
  return c10::Dispatcher::singleton()
      .findSchemaOrThrow("ampfuse::linear_cross_entropy", overload)
      .typed<Result(const at::Tensor&, const at::Tensor&, const at::Tensor&, const OptionalTensor&,
                    const OptionalTensor&, int64_t, int64_t, double, const OptionalTensor&,
                    const OptionalTensor&, double, std::optional<double>, std::optional<int64_t>,
                    const OptionalTensor&, std::optional<c10::string_view>,
                    at::OptionalIntArrayRef)>();
}

template <typename Op>
auto call_with(const Op& op, const at::Tensor& hidden, const at::Tensor& weight,
               const at::Tensor& target, const OptionalTensor& bias,
               const LinearCrossEntropyOptions& options) {
  const VocabShardArguments shard(options.shard());
  return op.call(hidden, weight, target, bias, options.class_weight(),
                 loss_reduction(kLinearCrossEntropy, options.reduction()), options.ignore_index(),
                 options.label_smoothing(), options.grad_scale(), options.denominator(),
                 options.z_loss(), options.softcap(), options.chunk_rows(),
                 options.accumulate_into(), shard.group(), shard.numbers());
}

}  // namespace

at::Tensor linear_cross_entropy(const at::Tensor& hidden, const at::Tensor& weight,
                                const at::Tensor& target, const OptionalTensor& bias,
                                const LinearCrossEntropyOptions& options) {
  static const auto op = find<at::Tensor>("");
  return call_with(op, hidden, weight, target, bias, options);
}

CrossEntropyWithMetrics linear_cross_entropy_with_metrics(
    const at::Tensor& hidden, const at::Tensor& weight, const at::Tensor& target,
    const OptionalTensor& bias, const LinearCrossEntropyOptions& options) {
  static const auto op =
      find<std::tuple<at::Tensor, at::Tensor, at::Tensor, at::Tensor>>("metrics");
  auto [loss, lse, entropy, argmax] = call_with(op, hidden, weight, target, bias, options);
  const at::Tensor correct = correct_predictions(argmax, target, options.ignore_index(), -1);
  return {loss, {lse, entropy, argmax, correct}};
}

}  // namespace ampfuse
