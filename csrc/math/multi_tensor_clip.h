#pragma once

#include "host_device.h"

namespace ampfuse::math {

// Returns torch's clip factor, min(1, max_norm / (norm + 1e-6)). A NaN norm gives a NaN factor, as
// with torch.clamp, and not 1.
AMPFUSE_HOST_DEVICE double clip_factor(double total_norm, double max_norm) {
  const double factor = max_norm / (total_norm + 1e-6);
  return factor > 1 ? 1 : factor;
}

}  // namespace ampfuse::math
