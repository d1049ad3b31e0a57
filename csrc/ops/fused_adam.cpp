#include "fused_adam.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ampfuse/fused_adam.h>

#include <cmath>

#include "../tensors/dtype_name.h"
#include "../tensors/float_dtypes.h"
#include "../tensors/tensor_list.h"
#include "fused_adam_kernels.h"

namespace ampfuse {

namespace {

constexpr const char* kWriteBackGrads = "write_back_grads";  // name of the overload

constexpr std::array<const char*, math::kAdamColumns> kNames = {
    "params", "grads", "exp_avgs", "exp_avg_sqs", "max_exp_avg_sqs", "masters"};

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

void check_column(const FusedAdamArguments& arguments, int column, size_t t) {
  const char* name = kNames[column];
  const at::Tensor& tensor = arguments.tensor(column, t);
  check_strided(kFusedAdam, name, t, tensor);
  const at::Tensor& param = arguments.tensor(math::kParam, t);
  check_device(kFusedAdam, name, t, tensor, kNames[math::kParam],
               arguments.tensor(math::kParam, 0));
  const char* wanted = wanted_dtype(column, param.scalar_type(), tensor.scalar_type());
  TORCH_CHECK_TYPE(*wanted == 0, kFusedAdam, ": ", name, "[", t, "]: expected ", wanted, ", got ",
                   dtype_name(tensor.scalar_type()));
  TORCH_CHECK_VALUE(same_shape(tensor, param), kFusedAdam, ": ", name, "[", t, "]: expected shape ",
                    param.sym_sizes(), " as params[", t, "], got ", tensor.sym_sizes());
  if (arguments.is_written(column)) check_no_overlap(kFusedAdam, name, t, tensor);
}

// Kernels have one template parameter for the dtype of all moments of a tensor.
void check_moments_alike(const FusedAdamArguments& arguments, size_t t) {
  const at::ScalarType dtype = arguments.tensor(math::kExpAvg, t).scalar_type();
  for (const auto column : {math::kExpAvgSq, math::kMaxExpAvgSq}) {
    if (!arguments.has(column)) continue;
    TORCH_CHECK_TYPE(arguments.tensor(column, t).scalar_type() == dtype, kFusedAdam, ": ",
                     kNames[column], "[", t, "]: expected dtype ", dtype_name(dtype),
                     " as exp_avgs[", t, "], got ",
                     dtype_name(arguments.tensor(column, t).scalar_type()));
  }
}

void check_state_step(const FusedAdamArguments& arguments, size_t t) {
  const at::Tensor& step = arguments.state_steps[t].toTensor();
  const at::Tensor& param = arguments.tensor(math::kParam, t);
  check_strided(kFusedAdam, "state_steps", t, step);
  TORCH_CHECK_TYPE(step.scalar_type() == at::kFloat, kFusedAdam, ": state_steps[", t,
                   "]: expected dtype float32, got ", dtype_name(step.scalar_type()));
  TORCH_CHECK_VALUE(step.sym_numel() == 1, kFusedAdam, ": state_steps[", t,
                    "]: expected a tensor with one element, got shape ", step.sym_sizes());
  TORCH_CHECK_VALUE(step.device() == param.device(), kFusedAdam, ": state_steps[", t,
                    "]: expected device ", param.device(), ", that of params[", t, "], got ",
                    step.device());
}

void check_lengths(const FusedAdamArguments& arguments) {
  const auto check = [&arguments](const char* name, TensorRefs list, bool is_there) {
    const size_t expected = is_there ? arguments.count() : 0;
    TORCH_CHECK_VALUE(list.size() == expected, kFusedAdam, ": ", name, ": expected ", expected,
                      is_there ? " tensors, one for each of params, got " : " tensors, got ",
                      list.size());
  };
  for (const auto column : {math::kGrad, math::kExpAvg, math::kExpAvgSq}) {
    check(kNames[column], arguments.columns[column], true);
  }
  check(kNames[math::kMaxExpAvgSq], arguments.columns[math::kMaxExpAvgSq],
        arguments.options.amsgrad);
  check("state_steps", arguments.state_steps, true);
  check(kNames[math::kMaster], arguments.columns[math::kMaster], arguments.has(math::kMaster));
}

void check_numbers(const math::AdamOptions& options) {
  const auto check = [](const char* name, double value, bool in_range, const char* range) {
    TORCH_CHECK_VALUE(in_range, kFusedAdam, ": ", name, ": expected ", range, ", got ", value);
  };
  check("beta1", options.beta1, options.beta1 >= 0 && options.beta1 < 1, "0 <= beta1 < 1");
  check("beta2", options.beta2, options.beta2 >= 0 && options.beta2 < 1, "0 <= beta2 < 1");
  // No lower bound: a schedule may make the weight decay negative, like the learning rate.
  check("weight_decay", options.weight_decay, !std::isnan(options.weight_decay), "a number");
  check("eps", options.eps, options.eps >= 0, "at least 0");
}

void check_scalars(const FusedAdamArguments& arguments) {
  std::vector<at::Tensor> first;  // scalars must be on the device of this tensor
  if (arguments.count() > 0) first.push_back(arguments.tensor(math::kParam, 0));
  const auto check = [&first](const char* name, const std::optional<at::Tensor>& scalar,
                              std::initializer_list<at::ScalarType> dtypes) {
    if (scalar) check_scalar(kFusedAdam, name, *scalar, dtypes, first, "params");
  };
  check("grad_scale", arguments.grad_scale, {at::kFloat});
  check("found_inf", arguments.found_inf, {at::kFloat});
  check("total_norm", arguments.total_norm, {at::kFloat, at::kDouble});
  check("grad_norm", arguments.grad_norm, {at::kFloat});
  // A learning rate on the CPU is accepted too: the host reads it without waiting.
  if (arguments.lr.defined() && arguments.lr.is_cpu()) first.clear();
  check("lr", arguments.lr, {at::kFloat, at::kDouble});
}

}  // namespace

FusedAdamArguments fused_adam_arguments(const NamedArguments& named) {
  FusedAdamArguments arguments;
  for (int column = 0; column < math::kAdamColumns; ++column) {
    arguments.columns[column] = named[kNames[column]].toListRef();
  }
  arguments.state_steps = named["state_steps"].toListRef();
  arguments.lr = named.tensor("lr");
  arguments.options = {.beta1 = named["beta1"].toDouble(),
                       .beta2 = named["beta2"].toDouble(),
                       .weight_decay = named["weight_decay"].toDouble(),
                       .eps = named["eps"].toDouble(),
                       .amsgrad = named["amsgrad"].toBool(),
                       .maximize = named["maximize"].toBool(),
                       .decoupled = named["decoupled_weight_decay"].toBool(),
                       .write_back_grads = named.schema().overload_name() == kWriteBackGrads,
                       .adopt_params = named["adopt_params"].toBool()};
  arguments.grad_scale = named.optional_tensor("grad_scale");
  arguments.found_inf = named.optional_tensor("found_inf");
  arguments.total_norm = named.optional_tensor("total_norm");
  arguments.grad_norm = named.optional_tensor("grad_norm");
  const auto max_norm = named["max_norm"].toOptional<double>();

  TORCH_CHECK_VALUE(arguments.total_norm.has_value() == max_norm.has_value(), kFusedAdam,
                    ": total_norm and max_norm: expected both or neither");
  TORCH_CHECK_VALUE(arguments.total_norm || !arguments.grad_norm, kFusedAdam,
                    ": grad_norm: expected none without total_norm");
  TORCH_CHECK_VALUE(!arguments.grad_norm || !arguments.grad_norm->is_same(*arguments.total_norm),
                    kFusedAdam, ": grad_norm: expected a tensor other than total_norm");
  arguments.max_norm = max_norm.value_or(0);
  check_numbers(arguments.options);
  check_lengths(arguments);
  check_scalars(arguments);
  return arguments;
}

const char* adam_column_name(int column) {
  return kNames[column];
}

void check_adam_tensor(const FusedAdamArguments& arguments, size_t t) {
  for (int column = 0; column < math::kAdamColumns; ++column) {
    if (arguments.has(column)) check_column(arguments, column, t);
  }
  check_moments_alike(arguments, t);
  check_state_step(arguments, t);
}

void fused_adam(const FusedAdamTensors& tensors, const FusedAdamOptions& options) {
  const auto find = [](const char* overload) {
    return c10::Dispatcher::singleton()
        .findSchemaOrThrow("ampfuse::fused_adam", overload)
        .typed<void(at::TensorList, at::TensorList, at::TensorList, at::TensorList, at::TensorList,
                    at::TensorList, at::TensorList, const at::Tensor&, double, double, double,
                    double, bool, bool, bool, const std::optional<at::Tensor>&,
                    const std::optional<at::Tensor>&, const std::optional<at::Tensor>&,
                    std::optional<double>, const std::optional<at::Tensor>&, bool)>();
  };
  static const auto read_grads = find("");
  static const auto write_back_grads = find(kWriteBackGrads);
  (options.write_back_grads ? write_back_grads : read_grads)
      .call(tensors.params, tensors.grads, tensors.exp_avgs, tensors.exp_avg_sqs,
            tensors.max_exp_avg_sqs, tensors.state_steps, tensors.masters, options.lr,
            options.beta1, options.beta2, options.weight_decay, options.eps, options.amsgrad,
            options.maximize, options.decoupled_weight_decay, options.grad_scale, options.found_inf,
            options.total_norm, options.max_norm, options.grad_norm, options.adopt_params);
}

namespace {

// Kernel for sparse tensors, and for devices that this build does not support. Does nothing for
// empty lists.
void fused_adam_no_backend(const FusedAdamArguments& arguments) {
  for (size_t t = 0; t < arguments.count(); ++t) check_adam_tensor(arguments, t);
  if (arguments.count() > 0) refuse_backend(kFusedAdam, {arguments.tensor(math::kParam, 0)});
}

}  // namespace

// The op has two overloads. By the schema of the first, gradients are only read, so autograd and
// the compiler need not assume that they change.
AMPFUSE_OPERATORS(m) {
  const auto define = [&m](const std::string& name, const std::string& grads) {
    m.def((name + "(Tensor(a!)[] params, " + grads +
           "[] grads, Tensor(c!)[] exp_avgs, Tensor(d!)[] exp_avg_sqs, "
           "Tensor(e!)[] max_exp_avg_sqs, Tensor(f!)[] state_steps, Tensor(g!)[] masters, *, "
           "Tensor lr, float beta1, float beta2, float weight_decay, float eps, bool amsgrad, "
           "bool maximize, bool decoupled_weight_decay, Tensor? grad_scale=None, "
           "Tensor? found_inf=None, Tensor? total_norm=None, float? max_norm=None, "
           "Tensor(h!)? grad_norm=None, bool adopt_params=False) -> ()")
              .c_str(),
          {at::Tag::pt2_compliant_tag});
  };
  define("fused_adam", "Tensor");
  define("fused_adam.write_back_grads", "Tensor(b!)");
}

AMPFUSE_KERNELS(CompositeExplicitAutograd, m) {
  register_fused_adam<fused_adam_no_backend>(m);
}

}  // namespace ampfuse
