#include "../ops/multi_tensor_norm.h"

#include "../ops/registration.h"
#include "../tensors/tensor_list.h"
#include "norm_pointers.h"
#include "torch_caller.h"

namespace ampfuse {

namespace {

NormOutputs multi_tensor_norm_cuda(at::TensorList tensors, double ord,
                                   std::optional<at::ScalarType> dtype) {
  const math::NormType type = norm_type("multi_tensor_norm", ord);
  check_norm_dtype("multi_tensor_norm", dtype);
  const DenseRuns dense("multi_tensor_norm", tensors, complex_as(type), Use::kRead);
  TorchCaller caller(tensors[0]);
  const NormOutputs outputs = empty_norm_outputs(tensors, dtype);
  launch_multi_tensor_norm(caller, dense.get(), type,
                           pointers_to(outputs, std::get<2>(outputs), /*clear_found_inf=*/true));
  return outputs;
}

}  // namespace

AMPFUSE_KERNELS(CUDA, m) {
  m.impl("multi_tensor_norm", multi_tensor_norm_cuda);
}

}  // namespace ampfuse
