#include "../ops/update_scale.h"

#include <ATen/ops/amax.h>
#include <ATen/ops/stack.h>

#include <vector>

#include "../ops/registration.h"
#include "torch_caller.h"
#include "update_scale_interface.h"

namespace ampfuse {

namespace {

void update_scale_cuda(const UpdateScaleArguments& arguments) {
  std::vector<at::Tensor> found_infs;
  for (const c10::IValue& flag : arguments.found_infs)
    found_infs.push_back(flag.toTensor().view(at::IntArrayRef()));
  TorchCaller caller(arguments.scale);
  // amax returns NaN if any flag is NaN; NaN is not 0, so it counts as an overflow.
  if (found_infs.size() > kScaleFlags) found_infs = {at::stack(found_infs).abs().amax()};
  ScaleFlags flags = {};
  for (const at::Tensor& flag : found_infs)
    flags.flags[flags.count++] = flag.const_data_ptr<float>();
  launch_update_scale(caller, flags, arguments.policy, arguments.memory());
}

}  // namespace

AMPFUSE_KERNELS(CUDA, m) {
  m.impl("update_scale",
         kernel_by_name<with_arguments<update_scale_arguments, update_scale_cuda>>());
}

}  // namespace ampfuse
