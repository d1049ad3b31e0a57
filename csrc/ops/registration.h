// Registers operators and kernels with torch's dispatcher, as TORCH_LIBRARY_FRAGMENT and
// TORCH_LIBRARY_IMPL do, unless another build of ampfuse is loaded in this process already.
//
//   AMPFUSE_OPERATORS(m) { m.def("multi_tensor_clip(...) -> ()"); }
//   AMPFUSE_KERNELS(CPU, m) { m.impl("multi_tensor_clip", multi_tensor_clip_cpu); }
#pragma once

#include <torch/library.h>

#include <type_traits>
#include <utility>

#include "named_arguments.h"

namespace ampfuse {

/// True if no other build of this library has registered its operators. torch throws if they are
/// registered twice, and nobody can catch an error while a library is being loaded. So a second
/// build registers nothing, and warns.
bool is_only_build();

template <auto kFunction>
void call_kernel_by_name(const c10::OperatorHandle& op, torch::jit::Stack* stack) {
  const NamedArguments arguments(op.schema(), *stack);
  if constexpr (std::is_void_v<decltype(kFunction(arguments))>) {
    kFunction(arguments);
    torch::jit::drop(*stack, op.schema().arguments().size());
  } else {
    auto results = kFunction(arguments);
    torch::jit::drop(*stack, op.schema().arguments().size());
    push_results(*stack, std::move(results));
  }
}

/// Makes a kernel of a function that takes NamedArguments and returns nothing, or results for
/// push_results().
template <auto kFunction>
torch::CppFunction kernel_by_name() {
  return torch::CppFunction::makeFromBoxedFunction<&call_kernel_by_name<kFunction>>();
}

/// Adapts a backend's kernel to kernel_by_name(): kArguments converts the named arguments to the
/// kernel's struct.
template <auto kArguments, auto kKernel>
void with_arguments(const NamedArguments& named) {
  kKernel(kArguments(named));
}

}  // namespace ampfuse

#define AMPFUSE_OPERATORS(m) AMPFUSE_OPERATORS_(m, C10_UID)
#define AMPFUSE_OPERATORS_(m, uid)                                    \
  static void C10_CONCATENATE(ampfuse_define_, uid)(torch::Library&); \
  TORCH_LIBRARY_FRAGMENT(ampfuse, library) {                          \
    if (::ampfuse::is_only_build()) {                                 \
      C10_CONCATENATE(ampfuse_define_, uid)(library);                 \
    }                                                                 \
  }                                                                   \
  static void C10_CONCATENATE(ampfuse_define_, uid)(torch::Library & m)

#define AMPFUSE_KERNELS(key, m) AMPFUSE_KERNELS_(key, m, C10_UID)
#define AMPFUSE_KERNELS_(key, m, uid)                                    \
  static void C10_CONCATENATE(ampfuse_implement_, uid)(torch::Library&); \
  TORCH_LIBRARY_IMPL(ampfuse, key, library) {                            \
    if (::ampfuse::is_only_build()) {                                    \
      C10_CONCATENATE(ampfuse_implement_, uid)(library);                 \
    }                                                                    \
  }                                                                      \
  static void C10_CONCATENATE(ampfuse_implement_, uid)(torch::Library & m)
