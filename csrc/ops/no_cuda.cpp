// In a build without CUDA kernels, every operator throws one sentence for tensors on a GPU. torch's
// own error would list every dispatch key, and no remedy.
#include "registration.h"

namespace ampfuse {

namespace {

void refuse(const c10::OperatorHandle& op, torch::jit::Stack*) {
  TORCH_CHECK_NOT_IMPLEMENTED(
      false, op.schema().name(),
      ": this build of ampfuse has no CUDA kernels. Build it again with ",
      "TORCH_CUDA_ARCH_LIST set to the GPU's compute capability (\"9.0\"), or with ",
      "AMPFUSE_WITH_CUDA=ON. `python -m ampfuse env` shows what was built");
}

}  // namespace

AMPFUSE_KERNELS(CUDA, m) {
  for (const char* const op :
       {"cross_entropy_", "cross_entropy_backward", "cross_entropy_forward",
        "cross_entropy_rescale_", "fused_adam", "fused_adam.write_back_grads",
        "linear_cross_entropy_backward", "linear_cross_entropy_forward", "multi_tensor_clip",
        "multi_tensor_norm", "multi_tensor_unscale", "multi_tensor_unscale_norm", "update_scale"}) {
    m.impl(op, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  }
}

}  // namespace ampfuse
