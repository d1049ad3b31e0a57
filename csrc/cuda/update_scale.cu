#include "update_scale.cuh"

#include <ATen/ops/amax.h>
#include <ATen/ops/stack.h>

#include "../ops/update_scale.h"
#include "stream.h"

namespace ampfuse {

void update_scale_cuda(const UpdateScaleArguments& arguments) {
  std::vector<at::Tensor> found_infs;
  for (const c10::IValue& flag : arguments.found_infs)
    found_infs.push_back(flag.toTensor().view(at::IntArrayRef()));
  const LaunchStream stream(arguments.scale);
  // amax returns NaN if any flag is NaN; NaN is not 0, so it counts as an overflow.
  if (found_infs.size() > kScaleFlags) found_infs = {at::stack(found_infs).abs().amax()};
  ScaleFlags flags = {};
  for (const at::Tensor& flag : found_infs)
    flags.flags[flags.count++] = flag.const_data_ptr<float>();
  stream.launch(update_scale_kernel, 1, flags, arguments.policy, arguments.memory());
}

}  // namespace ampfuse
