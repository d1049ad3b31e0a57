#include <ampfuse/build_info.h>

#include <ampfuse/version.h>

#include "cpu/capability.h"

namespace ampfuse {

BuildInfo build_info() {
  const char* const capabilities[] = {"DEFAULT", "AVX2", "AVX512"};
  return {AMPFUSE_VERSION,
          AMPFUSE_TORCH_VERSION,
          AMPFUSE_CUDA_VERSION,
          AMPFUSE_CUDA_ARCHS,
          AMPFUSE_COMPILER,
          AMPFUSE_BUILD_TYPE,
          capabilities[static_cast<int>(capability())]};
}

bool has_cuda() {
  return *AMPFUSE_CUDA_VERSION != '\0';
}

}  // namespace ampfuse
