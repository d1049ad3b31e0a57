// How a backend registers its kernel of fused_adam.
#pragma once

#include "fused_adam.h"
#include "registration.h"

namespace ampfuse {

template <auto kKernel>
void fused_adam_by_name(const NamedArguments& arguments) {
  kKernel(fused_adam_arguments(arguments));
}

/// Registers a function of FusedAdamArguments as the kernel of both overloads.
template <auto kKernel>
void register_fused_adam(torch::Library& library) {
  for (const char* overload : {"fused_adam", "fused_adam.write_back_grads"}) {
    library.impl(overload, kernel_by_name<fused_adam_by_name<kKernel>>());
  }
}

}  // namespace ampfuse
