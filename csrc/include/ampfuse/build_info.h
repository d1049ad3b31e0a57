#pragma once

#include <ampfuse/export.h>

#include <string>

namespace ampfuse {

/// How the loaded library was built, and which CPU kernels it uses.
struct BuildInfo {
  std::string version;         ///< version of ampfuse
  std::string torch_version;   ///< version of the torch it was built against
  std::string cuda_version;    ///< version of the CUDA toolkit; empty without CUDA kernels
  std::string cuda_archs;      ///< architectures, as "80-real 90-real"; empty without CUDA kernels
  std::string compiler;        ///< compiler of the host code
  std::string build_type;      ///< Release, Debug, ...
  std::string cpu_capability;  ///< CPU kernels in use: DEFAULT, AVX2 or AVX512
};

/// Returns how the loaded library was built, and which CPU kernels it uses.
AMPFUSE_API BuildInfo build_info();

/// Returns true if the library was built with its CUDA kernels, even if no GPU is present.
AMPFUSE_API bool has_cuda();

}  // namespace ampfuse
