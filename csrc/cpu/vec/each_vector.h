// A loop over consecutive elements in vector registers.
#pragma once

#include <cstdint>

#include "../../math/host_device.h"

namespace ampfuse::CPU_CAPABILITY {

/// Calls visit(i, size) for the elements [i, i + size) of each register, in order. The size is a
/// constant, except that of a shorter last register. If it is not, the compiler tests it at every
/// load and store, which makes the loop three times as long.
template <typename Vec, typename Visit>
AMPFUSE_HOST_DEVICE void for_each_vector(int64_t count, const Visit& visit) {
  int64_t i = 0;
  for (; i + Vec::size() <= count; i += Vec::size()) visit(i, Vec::size());
  if (i < count) visit(i, count - i);
}

}  // namespace ampfuse::CPU_CAPABILITY
