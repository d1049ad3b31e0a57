#include "capability.h"

#include <ATen/Version.h>

namespace ampfuse {

Capability capability() {
  static const Capability chosen = [] {
    [[maybe_unused]] const std::string torch = at::get_cpu_capability();
#if defined(AMPFUSE_X86)
    if (torch == "AVX512") return Capability::kAvx512;
    if (torch == "AVX2") return Capability::kAvx2;
#endif
    return Capability::kDefault;
  }();
  return chosen;
}

}  // namespace ampfuse
