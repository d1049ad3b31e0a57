#include "../ops/update_scale.h"
#include "../ops/registration.h"

namespace ampfuse {

namespace {

void update_scale_meta(const UpdateScaleArguments&) {}  // the arguments were checked before

}  // namespace

AMPFUSE_KERNELS(Meta, m) {
  m.impl("update_scale",
         kernel_by_name<with_arguments<update_scale_arguments, update_scale_meta>>());
}

}  // namespace ampfuse
