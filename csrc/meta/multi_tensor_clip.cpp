#include "../ops/multi_tensor_clip.h"
#include "../ops/registration.h"

namespace ampfuse {

namespace {

void multi_tensor_clip_meta(at::TensorList tensors, const at::Tensor& total_norm,
                            double /*max_norm*/) {
  check_multi_tensor_clip(tensors, total_norm);
}

}  // namespace

AMPFUSE_KERNELS(Meta, m) {
  m.impl("multi_tensor_clip", multi_tensor_clip_meta);
}

}  // namespace ampfuse
