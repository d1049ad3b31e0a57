#include "../ops/multi_tensor_norm.h"
#include "../ops/registration.h"

namespace ampfuse {

namespace {

NormOutputs multi_tensor_norm_meta(at::TensorList tensors, double ord,
                                   std::optional<at::ScalarType> dtype) {
  check_multi_tensor_norm(tensors, ord, dtype);
  return empty_norm_outputs(tensors, dtype);
}

}  // namespace

AMPFUSE_KERNELS(Meta, m) {
  m.impl("multi_tensor_norm", multi_tensor_norm_meta);
}

}  // namespace ampfuse
