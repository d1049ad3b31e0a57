#include "fused_step.h"

#include "../tensors/dtype_name.h"
#include "../tensors/float_dtypes.h"
#include "../tensors/tensor_list.h"
#include "fused_step_kernels.h"

namespace ampfuse {

namespace {

// Returns "" if the column may have `dtype` for a parameter of dtype `param`; otherwise the dtypes
// that it may have, for a message.
const char* wanted_dtype(int column, at::ScalarType param, at::ScalarType dtype) {
  switch (column) {
    case math::kParam:
      return has_float_kernels(param) ? "" : "float16, bfloat16, float32 or float64";
    case math::kGrad:
      if (param == at::kDouble) return dtype == at::kDouble ? "" : "float64, as the parameter is";
      return is_16bit(dtype) || dtype == at::kFloat ? "" : "float16, bfloat16 or float32";
    case math::kMaster:
      if (!is_16bit(param)) return "no master, since the parameter is not 16-bit";
      if (dtype == at::kFloat || (dtype == at::kShort && param == at::kBFloat16)) return "";
      return param == at::kBFloat16 ? "float32, or int16 for remainders" : "float32";
    default:
      if (param == at::kDouble) return dtype == at::kDouble ? "" : "float64, as the parameter is";
      return dtype == at::kFloat || dtype == at::kBFloat16 ? "" : "float32 or bfloat16";
  }
}

bool same_shape(const at::Tensor& a, const at::Tensor& b) {
  const bool is_symbolic = a.unsafeGetTensorImpl()->has_symbolic_sizes_strides() ||
                           b.unsafeGetTensorImpl()->has_symbolic_sizes_strides();
  return is_symbolic ? a.sym_sizes() == b.sym_sizes() : a.sizes() == b.sizes();
}

void check_column(const FusedStepArguments& arguments, int column, size_t t) {
  const char* op = arguments.names->op;
  const char* name = arguments.column_name(column);
  const at::Tensor& tensor = arguments.tensor(column, t);
  check_strided(op, name, t, tensor);
  const at::Tensor& param = arguments.tensor(math::kParam, t);
  check_device(op, name, t, tensor, "params", arguments.tensor(math::kParam, 0));
  const char* wanted = wanted_dtype(column, param.scalar_type(), tensor.scalar_type());
  TORCH_CHECK_TYPE(*wanted == 0, op, ": ", name, "[", t, "]: expected ", wanted, ", got ",
                   dtype_name(tensor.scalar_type()));
  TORCH_CHECK_VALUE(same_shape(tensor, param), op, ": ", name, "[", t, "]: expected shape ",
                    param.sym_sizes(), " as params[", t, "], got ", tensor.sym_sizes());
  if (arguments.is_written(column)) check_no_overlap(op, name, t, tensor);
}

// Kernels have one template parameter for the dtype of all moments of a tensor.
void check_moments_alike(const FusedStepArguments& arguments, size_t t) {
  for (int column = math::kFirstMoment + 1; column < math::kMostColumns; ++column) {
    if (!arguments.has(column)) continue;
    const at::ScalarType dtype = arguments.tensor(math::kFirstMoment, t).scalar_type();
    TORCH_CHECK_TYPE(arguments.tensor(column, t).scalar_type() == dtype, arguments.names->op, ": ",
                     arguments.column_name(column), "[", t, "]: expected dtype ", dtype_name(dtype),
                     " as ", arguments.column_name(math::kFirstMoment), "[", t, "], got ",
                     dtype_name(arguments.tensor(column, t).scalar_type()));
  }
}

void check_state_step(const FusedStepArguments& arguments, size_t t) {
  const char* op = arguments.names->op;
  const at::Tensor& step = arguments.step(t);
  const at::Tensor& param = arguments.tensor(math::kParam, t);
  check_strided(op, "state_steps", t, step);
  TORCH_CHECK_TYPE(step.scalar_type() == at::kFloat, op, ": state_steps[", t,
                   "]: expected dtype float32, got ", dtype_name(step.scalar_type()));
  TORCH_CHECK_VALUE(step.sym_numel() == 1, op, ": state_steps[", t,
                    "]: expected a tensor with one element, got shape ", step.sym_sizes());
  TORCH_CHECK_VALUE(step.device() == param.device(), op, ": state_steps[", t, "]: expected device ",
                    param.device(), ", that of params[", t, "], got ", step.device());
}

void check_lengths(const FusedStepArguments& arguments, int moments) {
  const auto check = [&arguments](const char* name, TensorRefs list, bool is_there) {
    const size_t expected = is_there ? arguments.count() : 0;
    TORCH_CHECK_VALUE(
        list.size() == expected, arguments.names->op, ": ", name, ": expected ", expected,
        is_there ? " tensors, one for each of params, got " : " tensors, got ", list.size());
  };
  check("grads", arguments.columns[math::kGrad], true);
  for (int column = math::kFirstMoment; column < math::kMostColumns; ++column) {
    const char* name = arguments.column_name(column);
    if (name) check(name, arguments.columns[column], column - math::kFirstMoment < moments);
  }
  check("state_steps", arguments.state_steps, moments > 0);
  check("masters", arguments.columns[math::kMaster], arguments.has(math::kMaster));
}

void check_scalars(const FusedStepArguments& arguments) {
  std::vector<at::Tensor> first;  // scalars must be on the device of this tensor
  if (arguments.count() > 0) first.push_back(arguments.tensor(math::kParam, 0));
  const auto check = [&](const char* name, const std::optional<at::Tensor>& scalar,
                         std::initializer_list<at::ScalarType> dtypes) {
    if (scalar) check_scalar(arguments.names->op, name, *scalar, dtypes, first, "params");
  };
  check("grad_scale", arguments.grad_scale, {at::kFloat});
  check("found_inf", arguments.found_inf, {at::kFloat});
  check("total_norm", arguments.total_norm, {at::kFloat, at::kDouble});
  check("grad_norm", arguments.grad_norm, {at::kFloat});
  // A learning rate on the CPU is accepted too: the host reads it without waiting.
  if (arguments.lr.is_cpu()) first.clear();
  check("lr", arguments.lr, {at::kFloat, at::kDouble});
}

}  // namespace

const char* FusedStepArguments::column_name(int column) const {
  constexpr std::array<const char*, math::kFirstMoment> kNames = {"params", "grads", "masters"};
  return column < math::kFirstMoment ? kNames[column] : names->moments[column - math::kFirstMoment];
}

void check_step_number(const StepNames& names, const char* name, double value, bool in_range,
                       const char* range) {
  TORCH_CHECK_VALUE(in_range, names.op, ": ", name, ": expected ", range, ", got ", value);
}

FusedStepArguments fused_step_arguments(const NamedArguments& named, const StepNames& names,
                                        int moments) {
  FusedStepArguments arguments = {};
  arguments.names = &names;
  for (int column = 0; column < math::kMostColumns; ++column) {
    const char* name = arguments.column_name(column);
    if (name) arguments.columns[column] = named[name].toListRef();
  }
  arguments.state_steps = named["state_steps"].toListRef();
  arguments.lr = named.tensor("lr");
  arguments.options = {.maximize = named["maximize"].toBool(),
                       .write_back_grads = named.schema().overload_name() == kWriteBackGrads,
                       .adopt_params = named["adopt_params"].toBool()};
  arguments.grad_scale = named.optional_tensor("grad_scale");
  arguments.found_inf = named.optional_tensor("found_inf");
  arguments.total_norm = named.optional_tensor("total_norm");
  arguments.grad_norm = named.optional_tensor("grad_norm");
  const auto max_norm = named["max_norm"].toOptional<double>();

  TORCH_CHECK_VALUE(arguments.total_norm.has_value() == max_norm.has_value(), names.op,
                    ": total_norm and max_norm: expected both or neither");
  TORCH_CHECK_VALUE(arguments.total_norm || !arguments.grad_norm, names.op,
                    ": grad_norm: expected none without total_norm");
  TORCH_CHECK_VALUE(!arguments.grad_norm || !arguments.grad_norm->is_same(*arguments.total_norm),
                    names.op, ": grad_norm: expected a tensor other than total_norm");
  arguments.max_norm = max_norm.value_or(0);
  check_lengths(arguments, moments);
  check_scalars(arguments);
  return arguments;
}

void check_step_tensor(const FusedStepArguments& arguments, size_t t) {
  // In the order of the schema, which has the masters last.
  for (const int column : {math::kParam, math::kGrad}) check_column(arguments, column, t);
  for (int column = math::kFirstMoment; column < math::kMostColumns; ++column) {
    if (arguments.has(column)) check_column(arguments, column, t);
  }
  if (arguments.has(math::kMaster)) check_column(arguments, math::kMaster, t);
  check_moments_alike(arguments, t);
  if (arguments.has_steps()) check_state_step(arguments, t);
}

void refuse_step_backend(const FusedStepArguments& arguments) {
  for (size_t t = 0; t < arguments.count(); ++t) check_step_tensor(arguments, t);
  if (arguments.count() > 0) {
    refuse_backend(arguments.names->op, {arguments.tensor(math::kParam, 0)});
  }
}

}  // namespace ampfuse
