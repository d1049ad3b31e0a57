// Shared memory, and CUDA's declarations of it as macros that kernels use instead.
#pragma once

#include <cstddef>

#include "simt/runtime.h"

namespace simt {

// Each lambda has a type of its own, so `Declaration` tells declarations apart, and instantiations
// of the template they stand in. Not inlined: ThreadSanitizer only sees calls of instrumented
// functions, and its reports would lose the declaration's line.
template <class T, std::size_t count, class Declaration>
[[gnu::noinline]] T (&shared_array(Declaration)) [count] {
  static constexpr char key = 0;
  return *static_cast<T(*)[count]>(runtime::shared_array(&key, sizeof(T[count]), alignof(T)));
}

}  // namespace simt

// The block's array `name`, in its own heap allocation: AddressSanitizer guards both ends and
// reports this line as the one that allocated it. Holds NaNs (all bits set) when the block starts.
#define AMPFUSE_SHARED(type, name, count) \
  type(&name)[count] = ::simt::shared_array<type, (count)>([] {})

// The bytes that the launch asked for. Every declaration in a kernel names the same memory.
#define AMPFUSE_DYNAMIC_SHARED(type, name) \
  type* const name = static_cast<type*>(::simt::runtime::dynamic_shared_array())
