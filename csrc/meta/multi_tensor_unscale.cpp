#include "../ops/multi_tensor_unscale.h"
#include "../ops/registration.h"

namespace ampfuse {

namespace {

void multi_tensor_unscale_meta(at::TensorList tensors, const at::Tensor& found_inf,
                               const at::Tensor& inv_scale) {
  check_multi_tensor_unscale("multi_tensor_unscale", tensors, found_inf, inv_scale);
}

UnscaledNormOutputs multi_tensor_unscale_norm_meta(at::TensorList tensors,
                                                   const at::Tensor& found_inf,
                                                   const at::Tensor& inv_scale, double ord,
                                                   std::optional<at::ScalarType> dtype) {
  check_multi_tensor_unscale("multi_tensor_unscale_norm", tensors, found_inf, inv_scale);
  norm_type("multi_tensor_unscale_norm", ord);
  check_norm_dtype("multi_tensor_unscale_norm", dtype);
  return unscaled(tensors.empty() ? zero_norm_outputs(found_inf.device(), dtype)
                                  : empty_norm_outputs(tensors, dtype));
}

}  // namespace

AMPFUSE_KERNELS(Meta, m) {
  m.impl("multi_tensor_unscale", multi_tensor_unscale_meta);
  m.impl("multi_tensor_unscale_norm", multi_tensor_unscale_norm_meta);
}

}  // namespace ampfuse
