#include "multi_tensor_unscale.h"

#include <ATen/core/dispatch/Dispatcher.h>
#include <ampfuse/multi_tensor_unscale.h>

#include "../tensors/tensor_list.h"
#include "registration.h"

namespace ampfuse {

void multi_tensor_unscale(at::TensorList tensors, const at::Tensor& found_inf,
                          const at::Tensor& inv_scale) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("ampfuse::multi_tensor_unscale", "")
                             .typed<void(at::TensorList, const at::Tensor&, const at::Tensor&)>();
  op.call(tensors, found_inf, inv_scale);
}

UnscaledNorm multi_tensor_unscale_norm(at::TensorList tensors, const at::Tensor& found_inf,
                                       const at::Tensor& inv_scale, double ord,
                                       std::optional<at::ScalarType> dtype) {
  static const auto op =
      c10::Dispatcher::singleton()
          .findSchemaOrThrow("ampfuse::multi_tensor_unscale_norm", "")
          .typed<UnscaledNormOutputs(at::TensorList, const at::Tensor&, const at::Tensor&, double,
                                     std::optional<at::ScalarType>)>();
  auto [total_norm, norms, first_nonfinite, nonfinite_count] =
      op.call(tensors, found_inf, inv_scale, ord, dtype);
  return {total_norm, norms, first_nonfinite, nonfinite_count};
}

void check_multi_tensor_unscale(const char* op, at::TensorList tensors, const at::Tensor& found_inf,
                                const at::Tensor& inv_scale) {
  check_writable_tensors(op, tensors);
  check_unscale_scalars(op, tensors, found_inf, inv_scale);
}

void check_unscale_scalars(const char* op, at::TensorList tensors, const at::Tensor& found_inf,
                           const at::Tensor& inv_scale) {
  check_scalar(op, "found_inf", found_inf, {at::kFloat}, tensors);
  check_scalar(op, "inv_scale", inv_scale, {at::kFloat}, tensors);
}

namespace {

void multi_tensor_unscale_no_backend(at::TensorList tensors, const at::Tensor& found_inf,
                                     const at::Tensor& inv_scale) {
  check_multi_tensor_unscale("multi_tensor_unscale", tensors, found_inf, inv_scale);
  refuse_backend("multi_tensor_unscale", tensors);
}

UnscaledNormOutputs multi_tensor_unscale_norm_no_backend(at::TensorList tensors,
                                                         const at::Tensor& found_inf,
                                                         const at::Tensor& inv_scale, double,
                                                         std::optional<at::ScalarType>) {
  check_multi_tensor_unscale("multi_tensor_unscale_norm", tensors, found_inf, inv_scale);
  refuse_backend("multi_tensor_unscale_norm", tensors);
}

}  // namespace

AMPFUSE_OPERATORS(m) {
  m.def("multi_tensor_unscale(Tensor(a!)[] tensors, Tensor(b!) found_inf, Tensor inv_scale) -> ()",
        {at::Tag::pt2_compliant_tag});
  m.def(
      "multi_tensor_unscale_norm(Tensor(a!)[] tensors, Tensor(b!) found_inf, Tensor inv_scale, "
      "float ord=2.0, *, ScalarType? dtype=None) -> (Tensor total_norm, Tensor norms, "
      "Tensor first_nonfinite, Tensor nonfinite_count)",
      {at::Tag::pt2_compliant_tag});
}

AMPFUSE_KERNELS(CompositeExplicitAutograd, m) {
  m.impl("multi_tensor_unscale", multi_tensor_unscale_no_backend);
  m.impl("multi_tensor_unscale_norm", multi_tensor_unscale_norm_no_backend);
}

}  // namespace ampfuse
