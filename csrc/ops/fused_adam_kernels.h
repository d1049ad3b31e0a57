// Registers a backend's kernel of fused_adam.
#pragma once

#include "fused_adam.h"
#include "registration.h"

namespace ampfuse {

/// Registers a function of FusedAdamArguments as the kernel of both overloads.
template <auto kKernel>
void register_fused_adam(torch::Library& library) {
  for (const char* overload : {"fused_adam", "fused_adam.write_back_grads"}) {
    library.impl(overload, kernel_by_name<with_arguments<fused_adam_arguments, kKernel>>());
  }
}

}  // namespace ampfuse
