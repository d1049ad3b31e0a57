#include "multi_tensor_norm.h"
#include "../tensors/dtype_name.h"
#include "registration.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/empty.h>
#include <ATen/ops/full.h>
#include <ATen/ops/zeros.h>
#include <ampfuse/multi_tensor_norm.h>

#include <cmath>

namespace ampfuse {

MultiTensorNorm multi_tensor_norm(at::TensorList tensors, double ord,
                                  std::optional<at::ScalarType> dtype) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("ampfuse::multi_tensor_norm", "")
          .typed<NormOutputs(at::TensorList, double, std::optional<at::ScalarType>)>();
  auto [total_norm, norms, found_inf, first_nonfinite, nonfinite_count] =
      op.call(tensors, ord, dtype);
  return {total_norm, norms, found_inf, first_nonfinite, nonfinite_count};
}

void check_multi_tensor_norm(at::TensorList tensors, double ord,
                             std::optional<at::ScalarType> dtype) {
  norm_type("multi_tensor_norm", ord);
  check_norm_dtype("multi_tensor_norm", dtype);
  check_tensors("multi_tensor_norm", tensors);
}

void check_norm_dtype(const char* op, std::optional<at::ScalarType> dtype) {
  TORCH_CHECK_TYPE(!dtype || *dtype == at::kFloat || *dtype == at::kDouble, op,
                   ": dtype: expected float32, float64 or None, got ", dtype_name(*dtype));
}

math::NormType norm_type(const char* op, double ord) {
  if (ord == 1) return math::NormType::kL1;
  if (ord == 2) return math::NormType::kL2;
  if (std::isinf(ord) && ord > 0) return math::NormType::kInf;
  TORCH_CHECK_VALUE(false, op, ": ord: expected 1, 2 or inf, got ", ord);
}

ComplexAs complex_as(math::NormType type) {
  // |z|² = re² + im², so the L2 norm may read the parts as two numbers. The other norms need |z|.
  return type == math::NormType::kL2 ? ComplexAs::kRealPairs : ComplexAs::kComplex;
}

NormOutputs empty_norm_outputs(at::TensorList tensors, std::optional<at::ScalarType> dtype) {
  const auto options =
      at::TensorOptions().device(tensors.empty() ? c10::Device(at::kCPU) : tensors[0].device());
  const auto norm = options.dtype(dtype ? *dtype : norm_dtype(tensors));
  const auto count = static_cast<int64_t>(tensors.size());
  return {at::empty({}, norm), at::empty({count}, norm), at::empty({}, options.dtype(at::kFloat)),
          at::empty({}, options.dtype(at::kLong)), at::empty({}, options.dtype(at::kLong))};
}

NormOutputs zero_norm_outputs(c10::Device device, std::optional<at::ScalarType> dtype) {
  const auto flag = at::TensorOptions().device(device).dtype(at::kFloat);
  const auto norm = flag.dtype(dtype.value_or(at::kFloat));
  const auto index = flag.dtype(at::kLong);
  return {at::zeros({}, norm), at::zeros({0}, norm), at::zeros({}, flag), at::full({}, -1, index),
          at::zeros({}, index)};
}

namespace {

// Kernel for an empty list, which names no backend: the norm is 0, on the CPU, as in torch. Throws
// for any other list.
NormOutputs multi_tensor_norm_no_backend(at::TensorList tensors, double ord,
                                         std::optional<at::ScalarType> dtype) {
  check_multi_tensor_norm(tensors, ord, dtype);
  if (!tensors.empty()) refuse_backend("multi_tensor_norm", tensors);
  return zero_norm_outputs(at::kCPU, dtype);
}

}  // namespace

AMPFUSE_OPERATORS(m) {
  m.def(
      "multi_tensor_norm(Tensor[] tensors, float ord=2.0, *, ScalarType? dtype=None) -> "
      "(Tensor total_norm, Tensor norms, Tensor found_inf, Tensor first_nonfinite, "
      "Tensor nonfinite_count)",
      {at::Tag::pt2_compliant_tag});
}

AMPFUSE_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("multi_tensor_norm", multi_tensor_norm_no_backend);
}

}  // namespace ampfuse
