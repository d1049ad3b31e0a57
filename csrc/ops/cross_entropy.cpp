#include "cross_entropy.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>

#include <utility>

#include "../math/cross_entropy.h"
#include "../tensors/dtype_name.h"
#include "../tensors/float_dtypes.h"
#include "../tensors/tensor_list.h"
#include "registration.h"

namespace ampfuse {

at::ScalarType loss_dtype(const at::Tensor& input) {
  return input.scalar_type() == at::kDouble ? at::kDouble : at::kFloat;
}

// The strides of a tensor without elements mean nothing.
bool has_contiguous_last_dim(const at::Tensor& rows) {
  return rows.sym_size(-1) <= 1 || rows.sym_stride(-1) == 1 || rows.sym_numel() == 0;
}

void check_class_dtype(const char* op, const at::Tensor& target) {
  const at::ScalarType dtype = target.scalar_type();
  TORCH_CHECK_TYPE(dtype == at::kLong || dtype == at::kInt || dtype == at::kByte, op,
                   ": target: expected indices (int64, int32 or uint8) or probabilities, got ",
                   dtype_name(dtype));
}

namespace {

void check_target(const char* op, const CrossEntropyArguments& arguments) {
  const at::Tensor& input = arguments.input;
  const at::Tensor& target = arguments.target;
  TORCH_CHECK_VALUE(target.device() == input.device(), op, ": target: expected input's device, ",
                    input.device(), ", got ", target.device());
  if (arguments.has_probabilities()) {
    const at::ScalarType dtype = target.scalar_type();
    TORCH_CHECK_TYPE(
        dtype == loss_dtype(input) || (loss_dtype(input) == at::kFloat && is_16bit(dtype)), op,
        ": target: expected probabilities of dtype ", dtype_name(loss_dtype(input)), ", got ",
        dtype_name(dtype));
    TORCH_CHECK_VALUE(target.sym_sizes() == input.sym_sizes() && has_contiguous_last_dim(target),
                      op, ": target: expected probabilities of shape ", input.sym_sizes(),
                      " whose last dimension has stride 1, got shape ", target.sym_sizes(),
                      " and strides ", target.sym_strides());
    TORCH_CHECK_VALUE(arguments.options.ignore_index < 0, op,
                      ": ignore_index is not supported for floating point target");
  } else {
    check_class_dtype(op, target);
    TORCH_CHECK_VALUE(
        target.dim() == 1 && target.sym_size(0) == arguments.rows() && target.is_contiguous(), op,
        ": target: expected contiguous indices of shape [", arguments.rows(), "], got ",
        target.sym_sizes());
  }
}

}  // namespace

void check_cross_entropy(const char* op, const CrossEntropyArguments& arguments) {
  const at::Tensor& input = arguments.input;
  const at::ScalarType dtype = input.scalar_type();
  TORCH_CHECK_TYPE(has_float_kernels(dtype), op,
                   ": input: expected dtype float16, bfloat16, float32 or float64, got ",
                   dtype_name(dtype));
  TORCH_CHECK_VALUE(
      input.layout() == at::kStrided && (input.dim() == 2 || input.dim() == 3) &&
          has_contiguous_last_dim(input),
      op,
      ": input: expected strided logits of shape [rows, classes] or [batch, classes, positions] "
      "whose last dimension has stride 1, got shape ",
      input.sym_sizes());
  check_target(op, arguments);
  if (arguments.weight) {
    const at::Tensor& weight = *arguments.weight;
    TORCH_CHECK_VALUE(weight.dim() == 1 && weight.sym_size(0) == input.sym_size(1) &&
                          weight.scalar_type() == loss_dtype(input) && weight.is_contiguous() &&
                          weight.device() == input.device(),
                      op, ": weight: expected contiguous ", dtype_name(loss_dtype(input)),
                      " of shape [", input.sym_size(1), "] on ", input.device(), ", got ",
                      dtype_name(weight.scalar_type()), " of shape ", weight.sym_sizes(),
                      " and strides ", weight.sym_strides(), " on ", weight.device());
  }
  arguments.options.check(op, loss_dtype(input));
}

bool can_be_overwritten(const at::Tensor& rows) {
  if (rows.layout() != at::kStrided || rows.is_neg()) return false;
  if (rows.dim() == 3) return rows.is_contiguous();
  return rows.dim() == 2 && has_contiguous_last_dim(rows) &&
         (rows.sym_size(0) <= 1 || rows.sym_stride(0) >= rows.sym_size(1));
}

void check_cross_entropy_in_place(const at::Tensor& input) {
  TORCH_CHECK_VALUE(input.dim() == 2 && can_be_overwritten(input),
                    "cross_entropy_: input: expected logits of shape [batch, classes] whose class "
                    "dimension has stride 1 and whose rows share no memory, got shape ",
                    input.sym_sizes(), " and strides ", input.sym_strides());
}

void check_target_memory(const CrossEntropyArguments& arguments) {
  check_memory(kCrossEntropy, "target", arguments.target);
  if (arguments.weight) check_memory(kCrossEntropy, "weight", *arguments.weight);
}

void check_cross_entropy_memory(const CrossEntropyArguments& arguments) {
  check_memory(kCrossEntropy, "input", arguments.input);
  check_target_memory(arguments);
}

void check_cross_entropy_scalar(const char* op, const char* name,
                                const std::optional<at::Tensor>& scalar, at::ScalarType dtype,
                                const at::Tensor& input) {
  if (!scalar) return;
  TORCH_CHECK_VALUE(scalar->sym_numel() == 1 && scalar->scalar_type() == dtype &&
                        scalar->device() == input.device(),
                    op, ": ", name, ": expected one ", dtype_name(dtype), " on ", input.device(),
                    ", got ", dtype_name(scalar->scalar_type()), " of shape ", scalar->sym_sizes(),
                    " on ", scalar->device());
}

void check_cross_entropy_backward(const char* op, const CrossEntropyArguments& arguments,
                                  const at::Tensor& grad_output, const at::Tensor& statistics,
                                  const at::Tensor& divisor) {
  const c10::SymInt rows = arguments.rows();
  const bool is_per_row = arguments.options.is_per_row();
  const c10::Device device = arguments.input.device();
  TORCH_CHECK_VALUE(
      grad_output.dim() == (is_per_row ? 1 : 0) &&
          (!is_per_row || grad_output.sym_size(0) == rows) && grad_output.device() == device,
      op, ": grad_output: expected one number", is_per_row ? " for each row" : "", " on ", device,
      ", got shape ", grad_output.sym_sizes(), " on ", grad_output.device());
  TORCH_CHECK_VALUE(
      statistics.scalar_type() == at::kDouble && statistics.dim() == 2 &&
          statistics.sym_size(0) == rows && statistics.sym_size(1) == math::kRowStatistics &&
          statistics.is_contiguous() && statistics.device() == device,
      op, ": statistics: expected contiguous float64 of shape [", rows, ", ", math::kRowStatistics,
      "] on ", device, ", as the forward operator returned, got ",
      dtype_name(statistics.scalar_type()), " of shape ", statistics.sym_sizes(), " on ",
      statistics.device());
  check_cross_entropy_scalar(op, "divisor", divisor, at::kDouble, arguments.input);
}

LossOutputs empty_loss_outputs(const CrossEntropyArguments& arguments, ForBackward for_backward,
                               bool with_metrics) {
  const c10::SymInt rows = arguments.rows();
  const auto options = arguments.input.options();
  const auto numbers = options.dtype(loss_dtype(arguments.input));
  const auto doubles = options.dtype(at::kDouble);
  const std::vector<c10::SymInt> nothing = {0};
  const std::vector<c10::SymInt> each_row = {rows};
  const auto& metric = with_metrics ? each_row : nothing;
  return {.loss = arguments.options.is_per_row() ? at::empty_symint(each_row, numbers)
                                                 : at::empty({}, numbers),
          .baked_scale = at::empty({}, options.dtype(at::kFloat)),
          .statistics = for_backward == ForBackward::kStatistics
                            ? at::empty_symint({rows, math::kRowStatistics}, doubles)
                            : at::empty({0}, doubles),
          .divisor = at::empty({}, doubles),
          .lse = at::empty_symint(metric, numbers),
          .entropy = at::empty_symint(metric, numbers),
          .argmax = at::empty_symint(metric, options.dtype(at::kLong))};
}

// --- calls ---------------------------------------------------------------------------------------

namespace {

NamedValues named(const CrossEntropyArguments& arguments) {
  NamedValues values = arguments.options.named();
  values.emplace_back("input", arguments.input);
  values.emplace_back("target", arguments.target);
  values.emplace_back("weight", arguments.weight);
  return values;
}

NamedValues named(const CrossEntropyCall& call) {
  NamedValues values = named(call.arguments);
  values.emplace_back("grad_scale", call.grad_scale);
  values.emplace_back("denominator", call.denominator);
  return values;
}

}  // namespace

CrossEntropyArguments CrossEntropyArguments::from(const NamedArguments& named) {
  return {.input = named.tensor("input"),
          .target = named.tensor("target"),
          .weight = named.optional_tensor("weight"),
          .options = LossOptions::from(values_in(named))};
}

CrossEntropyCall CrossEntropyCall::from(const NamedArguments& named) {
  const auto tensor_or_none = [&](const char* name) {
    return named.find(name) == nullptr ? std::nullopt : named.optional_tensor(name);
  };
  return {.arguments = CrossEntropyArguments::from(named),
          .grad_scale = tensor_or_none("grad_scale"),
          .denominator = tensor_or_none("denominator")};
}

CrossEntropyOutputs cross_entropy_forward(const CrossEntropyCall& call, ForBackward for_backward) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("ampfuse::cross_entropy_forward", "");
  NamedValues values = named(call);
  values.emplace_back("for_backward", static_cast<int64_t>(for_backward));
  values.emplace_back("with_metrics", call.with_metrics);
  return results_of<CrossEntropyOutputs>(call_by_name(op, std::move(values)));
}

CrossEntropyInPlaceOutputs cross_entropy_in_place(const CrossEntropyCall& call) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("ampfuse::cross_entropy_", "");
  return results_of<CrossEntropyInPlaceOutputs>(call_by_name(op, named(call)));
}

at::Tensor cross_entropy_backward(const at::Tensor& grad_output,
                                  const CrossEntropyArguments& arguments,
                                  const at::Tensor& statistics, const at::Tensor& divisor) {
  static const auto op =
      c10::Dispatcher::singleton().findSchemaOrThrow("ampfuse::cross_entropy_backward", "");
  NamedValues values = named(arguments);
  values.emplace_back("grad_output", grad_output);
  values.emplace_back("statistics", statistics);
  values.emplace_back("divisor", divisor);
  return call_by_name(op, std::move(values))[0].toTensor();
}

void cross_entropy_rescale_(const at::Tensor& grad, const at::Tensor& baked_scale,
                            const at::Tensor& grad_output) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("ampfuse::cross_entropy_rescale_", "")
          .typed<void(const at::Tensor&, const at::Tensor&, const at::Tensor&)>();
  op.call(grad, baked_scale, grad_output);
}

AMPFUSE_OPERATORS(m) {
  // The public operators. All but cross_entropy_ are composed of those below.
  m.def(
      "cross_entropy(Tensor input, Tensor target, Tensor? weight=None, int reduction=1, "
      "int ignore_index=-100, float label_smoothing=0.0, *, Tensor? grad_scale=None, "
      "Tensor? denominator=None, float z_loss=0.0, float? softcap=None) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  // This one replaces torch.nn.functional.cross_entropy, so it is differentiable twice.
  m.def(
      "cross_entropy.as_torch(Tensor input, Tensor target, Tensor? weight=None, int reduction=1, "
      "int ignore_index=-100, float label_smoothing=0.0) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "cross_entropy.metrics(Tensor input, Tensor target, Tensor? weight=None, int reduction=1, "
      "int ignore_index=-100, float label_smoothing=0.0, *, Tensor? grad_scale=None, "
      "Tensor? denominator=None, float z_loss=0.0, float? softcap=None) -> "
      "(Tensor loss, Tensor lse, Tensor entropy, Tensor argmax, Tensor correct)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "cross_entropy_(Tensor(a!) input, Tensor target, Tensor? weight=None, int reduction=1, "
      "int ignore_index=-100, float label_smoothing=0.0, *, Tensor? grad_scale=None, "
      "Tensor? denominator=None, float z_loss=0.0, float? softcap=None) -> "
      "(Tensor loss, Tensor baked_scale)");
  // These operators take rows and have no derivative. for_backward is a ForBackward: 0, nothing; 1,
  // statistics; 2, the gradient.
  m.def(
      "cross_entropy_forward(Tensor input, Tensor target, Tensor? weight, int reduction, "
      "int ignore_index, float label_smoothing, Tensor? grad_scale, Tensor? denominator, "
      "float z_loss, float? softcap, int for_backward, bool with_metrics) -> (Tensor loss, "
      "Tensor grad, Tensor baked_scale, Tensor statistics, Tensor divisor, Tensor lse, "
      "Tensor entropy, Tensor argmax)",
      {at::Tag::pt2_compliant_tag});
  m.def(
      "cross_entropy_backward(Tensor grad_output, Tensor input, Tensor target, Tensor? weight, "
      "Tensor statistics, Tensor divisor, int reduction, int ignore_index, "
      "float label_smoothing, float z_loss, float? softcap) -> Tensor",
      {at::Tag::pt2_compliant_tag});
  m.def("cross_entropy_rescale_(Tensor(a!) grad, Tensor baked_scale, Tensor grad_output) -> ()",
        {at::Tag::pt2_compliant_tag});
}

}  // namespace ampfuse
