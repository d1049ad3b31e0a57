// Defines the operators of fused optimizers, and registers a backend's kernels for them.
#pragma once

#include <string>

#include "fused_step.h"
#include "registration.h"

namespace ampfuse {

inline constexpr const char* kWriteBackGrads = "write_back_grads";  // name of the overload

/// Defines an operator with two overloads. By the schema of the first, gradients are only read, so
/// autograd and the compiler need not assume that they change.
///
/// \param moments The lists of moments in the schema.
/// \param options The rule's options in the schema.
inline void define_fused_step(torch::Library& library, const std::string& op,
                              const std::string& moments, const std::string& options) {
  const auto define = [&](const std::string& name, const std::string& grads) {
    library.def((name + "(Tensor(a!)[] params, " + grads + "[] grads, " + moments +
                 "Tensor(f!)[] state_steps, Tensor(g!)[] masters, *, Tensor lr, " + options +
                 "Tensor? grad_scale=None, Tensor? found_inf=None, Tensor? total_norm=None, "
                 "float? max_norm=None, Tensor(h!)? grad_norm=None, bool adopt_params=False, "
                 "Tensor(i!)[]? units=None, Tensor(j!)[]? ema_params=None, float ema_decay=0, "
                 "bool round_at_random=False, int seed=0, int[] first_indices=[]) -> ()")
                    .c_str(),
                {at::Tag::pt2_compliant_tag});
  };
  define(op, "Tensor");
  define(op + "." + kWriteBackGrads, "Tensor(b!)");
}

/// Registers the kernel of both overloads: kArguments converts the named arguments to its struct.
template <auto kArguments, auto kKernel>
void register_fused_step(torch::Library& library, const std::string& op) {
  for (const std::string& name : {op, op + "." + kWriteBackGrads}) {
    library.impl(name.c_str(), kernel_by_name<with_arguments<kArguments, kKernel>>());
  }
}

}  // namespace ampfuse
