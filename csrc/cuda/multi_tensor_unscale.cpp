#include "../ops/multi_tensor_unscale.h"

#include "../ops/registration.h"
#include "../tensors/tensor_list.h"
#include "norm_pointers.h"
#include "torch_caller.h"

namespace ampfuse {

namespace {

void multi_tensor_unscale_cuda(at::TensorList tensors, const at::Tensor& found_inf,
                               const at::Tensor& inv_scale) {
  const DenseRuns dense("multi_tensor_unscale", tensors, ComplexAs::kRealPairs, Use::kWrite);
  check_unscale_scalars("multi_tensor_unscale", tensors, found_inf, inv_scale);
  TorchCaller caller(found_inf);
  launch_multi_tensor_unscale(caller, dense.get(), inv_scale.const_data_ptr<float>(),
                              found_inf.mutable_data_ptr<float>());
  dense.write_back();
}

UnscaledNormOutputs multi_tensor_unscale_norm_cuda(at::TensorList tensors,
                                                   const at::Tensor& found_inf,
                                                   const at::Tensor& inv_scale, double ord,
                                                   std::optional<at::ScalarType> dtype) {
  const char* op = "multi_tensor_unscale_norm";
  const math::NormType type = norm_type(op, ord);
  check_norm_dtype(op, dtype);
  const DenseRuns dense(op, tensors, complex_as(type), Use::kWrite);
  check_unscale_scalars(op, tensors, found_inf, inv_scale);
  if (tensors.empty()) return unscaled(zero_norm_outputs(found_inf.device(), dtype));
  TorchCaller caller(found_inf);
  const NormOutputs outputs = empty_norm_outputs(tensors, dtype);
  launch_multi_tensor_unscale_norm(caller, dense.get(), type, inv_scale.const_data_ptr<float>(),
                                   pointers_to(outputs, found_inf, /*clear_found_inf=*/false));
  dense.write_back();
  return unscaled(outputs);
}

}  // namespace

AMPFUSE_KERNELS(CUDA, m) {
  m.impl("multi_tensor_unscale", multi_tensor_unscale_cuda);
  m.impl("multi_tensor_unscale_norm", multi_tensor_unscale_norm_cuda);
}

}  // namespace ampfuse
