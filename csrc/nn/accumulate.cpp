#include <ampfuse/accumulate.h>

#include "../tensors/dtype_name.h"

namespace ampfuse {

at::Tensor CountTargets::operator()(const at::Tensor& targets) const {
  TORCH_CHECK_TYPE(!targets.is_floating_point(),
                   "accumulate: expected micro-batches with integer targets, got ",
                   dtype_name(targets.scalar_type()),
                   "; pass count, a function that returns how many targets a micro-batch has");
  return targets.to(at::kLong).ne(-100).sum();  // in uint8, -100 would be 156
}

}  // namespace ampfuse
