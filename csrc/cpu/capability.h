// Sources under cpu/vec/ are compiled once per instruction set, each time into the namespace
// CPU_CAPABILITY, which is DEFAULT, AVX2 or AVX512 then. This header declares all of a function's
// compilations and chooses one as torch chose its own (ATEN_CPU_CAPABILITY overrides both).
#pragma once

namespace ampfuse {

enum class Capability { kDefault, kAvx2, kAvx512 };

/// What this processor and this build both have.
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
