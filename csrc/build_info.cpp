#include <ampfuse/build_info.h>

#include <ampfuse/version.h>

#include "cpu/capability.h"
#if AMPFUSE_HAS_CUDA
#include "cuda/caller.h"
#else
namespace ampfuse {
static const char* kernels_cuda_version() {
  return "";
}
static const char* kernels_architectures() {
  return "";
}
}  // namespace ampfuse
#endif

namespace ampfuse {

BuildInfo build_info() {
  const char* const capabilities[] = {"DEFAULT", "AVX2", "AVX512"};
  return {AMPFUSE_VERSION,
          AMPFUSE_TORCH_VERSION,
          kernels_cuda_version(),
          kernels_architectures(),
          AMPFUSE_COMPILER,
          AMPFUSE_BUILD_TYPE,
          capabilities[static_cast<int>(capability())]};
}

bool has_cuda() {
  return AMPFUSE_HAS_CUDA;
}

}  // namespace ampfuse
