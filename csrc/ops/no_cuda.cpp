// In a build without CUDA kernels, every operator throws a short error with a remedy for tensors on
// a GPU. torch's own error would list every dispatch key, and no remedy.
#include "operators.h"
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
  for (const OperatorEntry& op : kOperators) {
    m.impl(op.name, torch::CppFunction::makeFromBoxedFunction<&refuse>());
  }
}

}  // namespace ampfuse
