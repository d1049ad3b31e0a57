#include "../ops/update_scale.h"

namespace ampfuse {

namespace {

void update_scale_meta(const UpdateScaleArguments&) {}  // which have been checked

}  // namespace

TORCH_LIBRARY_IMPL(ampfuse, Meta, m) {
  register_update_scale<update_scale_meta>(m);
}

}  // namespace ampfuse
