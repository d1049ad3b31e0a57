#include "../ops/update_scale.h"
#include "../ops/registration.h"

namespace ampfuse {

namespace {

void update_scale_cpu(const UpdateScaleArguments& arguments) {
  bool overflow = false;
  for (const c10::IValue& flag : arguments.found_infs) {
    overflow = overflow || *flag.toTensor().const_data_ptr<float>() != 0;
  }
  math::update_scale(arguments.memory(), arguments.policy, overflow);
}

}  // namespace

AMPFUSE_KERNELS(CPU, m) {
  m.impl("update_scale",
         kernel_by_name<with_arguments<update_scale_arguments, update_scale_cpu>>());
}

}  // namespace ampfuse
