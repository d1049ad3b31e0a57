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
    default:  // moments and averages
      if (param == at::kDouble) return dtype == at::kDouble ? "" : "float64, as the parameter is";
      return dtype == at::kFloat || dtype == at::kBFloat16 ? "" : "float32 or bfloat16";
  }
}

// The same for moments in 8 bits.
const char* wanted_code(int column, at::ScalarType param, at::ScalarType dtype) {
  if (param == at::kDouble) return "no 8-bit moment, since the parameter is float64";
  if (column == math::kFirstMoment) return dtype == at::kChar ? "" : "int8, a code with a unit";
  return dtype == at::kByte ? "" : "uint8, a code with a unit";
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
  const auto wanted_of =
      arguments.is_coded() && math::is_moment(column) ? wanted_code : wanted_dtype;
  const char* wanted = wanted_of(column, param.scalar_type(), tensor.scalar_type());
  TORCH_CHECK_TYPE(*wanted == 0, op, ": ", name, "[", t, "]: expected ", wanted, ", got ",
                   dtype_name(tensor.scalar_type()));
  TORCH_CHECK_VALUE(same_shape(tensor, param), op, ": ", name, "[", t, "]: expected shape ",
                    param.sym_sizes(), " as params[", t, "], got ", tensor.sym_sizes());
  if (arguments.is_written(column)) check_no_overlap(op, name, t, tensor);
}

void check_units(const FusedStepArguments& arguments, int column, size_t t) {
  const char* op = arguments.names->op;
  const size_t index = (column - math::kFirstUnit) * arguments.count() + t;
  const at::Tensor& units = arguments.tensor(column, t);
  const at::Tensor& param = arguments.tensor(math::kParam, t);
  check_strided(op, "units", index, units);
  check_device(op, "units", index, units, "params", arguments.tensor(math::kParam, 0));
  TORCH_CHECK_TYPE(units.scalar_type() == at::kBFloat16, op, ": units[", index,
                   "]: expected bfloat16, got ", dtype_name(units.scalar_type()));
  const auto expected = number_of_units(param.sym_numel());
  TORCH_CHECK_VALUE(units.dim() == 1 && units.sym_numel() == expected && units.is_contiguous(), op,
                    ": units[", index, "]: expected a contiguous tensor of shape [", expected,
                    "], one number for each ", math::kCodeGroup, " elements of params[", t,
                    "], got shape ", units.sym_sizes());
}

// Kernels have one template parameter for the dtype of all moments of a tensor.
void check_moments_alike(const FusedStepArguments& arguments, size_t t) {
  if (arguments.is_coded()) return;
  for (int column = math::kFirstMoment + 1; math::is_moment(column); ++column) {
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
  for (int column = math::kFirstMoment; math::is_moment(column); ++column) {
    const char* name = arguments.column_name(column);
    if (name) check(name, arguments.columns[column], column - math::kFirstMoment < moments);
  }
  const bool counts = moments > 0 || arguments.options.round_at_random || arguments.has(math::kEma);
  check("state_steps", arguments.state_steps, counts);
  check("masters", arguments.columns[math::kMaster], arguments.has(math::kMaster));
  check("ema_params", arguments.columns[math::kEma], arguments.has(math::kEma));
  const size_t indices = arguments.first_indices.size();
  TORCH_CHECK_VALUE(indices == 0 || indices == arguments.count(), arguments.names->op,
                    ": first_indices: expected none, or ", arguments.count(),
                    ", one for each of params, got ", indices);
}

// Reads the list of units: those of the first moments, then those of the second.
void read_units(FusedStepArguments& arguments, TensorRefs units, int moments) {
  if (units.empty()) return;
  const char* op = arguments.names->op;
  TORCH_CHECK_VALUE(moments <= math::kMostCodedMoments, op,
                    ": units: expected none with amsgrad, which has no 8-bit moments");
  const size_t count = arguments.count();
  TORCH_CHECK_VALUE(units.size() == count * moments, op, ": units: expected ", count * moments,
                    " tensors, one for each moment of each of params, got ", units.size());
  for (int m = 0; m < moments; ++m) {
    arguments.columns[math::kFirstUnit + m] = units.slice(m * count, count);
  }
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
  if (math::is_unit(column)) return "units";
  if (column == math::kEma) return "ema_params";
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
  for (int column = 0; column < math::kFirstUnit; ++column) {
    const char* name = arguments.column_name(column);
    if (name) arguments.columns[column] = named[name].toListRef();
  }
  const auto optional_list = [&named](const char* name) {
    return named[name].isNone() ? TensorRefs() : named[name].toListRef();
  };
  read_units(arguments, optional_list("units"), moments);
  arguments.columns[math::kEma] = optional_list("ema_params");
  arguments.first_indices = named["first_indices"].toListRef();
  arguments.state_steps = named["state_steps"].toListRef();
  arguments.lr = named.tensor("lr");
  arguments.options = {.maximize = named["maximize"].toBool(),
                       .write_back_grads = named.schema().overload_name() == kWriteBackGrads,
                       .adopt_params = named["adopt_params"].toBool(),
                       .round_at_random = named["round_at_random"].toBool(),
                       .seed = static_cast<uint64_t>(named["seed"].toInt()),
                       .ema_weight = 1 - named["ema_decay"].toDouble()};
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
  const double ema_decay = named["ema_decay"].toDouble();
  check_step_number(names, "ema_decay", ema_decay, ema_decay >= 0 && ema_decay < 1,
                    "0 <= ema_decay < 1");
  check_lengths(arguments, moments);
  check_scalars(arguments);
  return arguments;
}

void check_step_tensor(const FusedStepArguments& arguments, size_t t) {
  // In the order of the schema, which has the masters last.
  for (const int column : {math::kParam, math::kGrad}) check_column(arguments, column, t);
  for (int column = math::kFirstMoment; math::is_moment(column); ++column) {
    if (arguments.has(column)) check_column(arguments, column, t);
  }
  if (arguments.has(math::kMaster)) check_column(arguments, math::kMaster, t);
  for (int column = math::kFirstUnit; math::is_unit(column); ++column) {
    if (arguments.has(column)) check_units(arguments, column, t);
  }
  if (arguments.has(math::kEma)) check_column(arguments, math::kEma, t);
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
