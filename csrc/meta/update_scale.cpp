#include "../ops/update_scale.h"
#include "../ops/registration.h"

namespace ampfuse {

namespace {

void update_scale_meta(const UpdateScaleArguments&) {}  // which have been checked

}  // namespace

AMPFUSE_KERNELS(Meta, m) {
  register_update_scale<update_scale_meta>(m);
}

}  // namespace ampfuse
