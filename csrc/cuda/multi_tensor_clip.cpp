#include "../ops/multi_tensor_clip.h"

#include "../ops/registration.h"
#include "../tensors/tensor_list.h"
#include "multi_tensor_interface.h"
#include "torch_caller.h"

namespace ampfuse {

namespace {

void multi_tensor_clip_cuda(at::TensorList tensors, const at::Tensor& total_norm, double max_norm) {
  const DenseRuns dense("multi_tensor_clip", tensors, ComplexAs::kRealPairs, Use::kWrite);
  check_clip_norm(tensors, total_norm);
  TorchCaller caller(total_norm);
  launch_multi_tensor_clip(caller, dense.get(), total_norm.const_data_ptr(),
                           total_norm.scalar_type() == at::kDouble, max_norm);
  dense.write_back();
}

}  // namespace

AMPFUSE_KERNELS(CUDA, m) {
  m.impl("multi_tensor_clip", multi_tensor_clip_cuda);
}

}  // namespace ampfuse
