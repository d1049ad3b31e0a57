#pragma once

#include <ampfuse/export.h>

#include <string>

namespace ampfuse {

/// How the loaded library was built, and what it chose on this processor.
struct BuildInfo {
  std::string version;         ///< of ampfuse
  std::string torch_version;   ///< the torch it was built against
  std::string cuda_version;    ///< of the toolkit that compiled the kernels; empty without CUDA
  std::string cuda_archs;      ///< e.g. "80-real 90-real"; empty without CUDA
  std::string compiler;        ///< of the host code
  std::string build_type;      ///< Release, Debug, ...
  std::string cpu_capability;  ///< the CPU kernels in use here: DEFAULT, AVX2 or AVX512
};

AMPFUSE_API BuildInfo build_info();

/// Whether the library was built with its CUDA kernels. Says nothing about a GPU being there.
AMPFUSE_API bool has_cuda();

}  // namespace ampfuse
