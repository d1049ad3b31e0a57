// Sources under cpu/vec/ are compiled once per instruction set, each time into the namespace
// CPU_CAPABILITY, a macro that is DEFAULT, AVX2 or AVX512. The macros below declare all versions of
// a function and choose the one for the instruction set that torch uses. The environment variable
// ATEN_CPU_CAPABILITY overrides torch's choice, and with it this one.
#pragma once

namespace ampfuse {

enum class Capability { kDefault, kAvx2, kAvx512 };

/// Returns the instruction set of the kernels in use: torch's, or the default if this build lacks
/// it.
Capability capability();

}  // namespace ampfuse

#if defined(AMPFUSE_X86)
#define AMPFUSE_PER_CAPABILITY(...) \
  namespace DEFAULT {               \
  __VA_ARGS__;                      \
  }                                 \
  namespace AVX2 {                  \
  __VA_ARGS__;                      \
  }                                 \
  namespace AVX512 {                \
  __VA_ARGS__;                      \
  }
#define AMPFUSE_CHOOSE(function)                                                 \
  (::ampfuse::capability() == ::ampfuse::Capability::kAvx512 ? &AVX512::function \
   : ::ampfuse::capability() == ::ampfuse::Capability::kAvx2 ? &AVX2::function   \
                                                             : &DEFAULT::function)
#else
#define AMPFUSE_PER_CAPABILITY(...) \
  namespace DEFAULT {               \
  __VA_ARGS__;                      \
  }
#define AMPFUSE_CHOOSE(function) (&DEFAULT::function)
#endif
