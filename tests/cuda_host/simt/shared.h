// Shared memory, with macros that kernels use instead of CUDA's declarations.
#pragma once

#include <cstddef>

#include "simt/runtime.h"

namespace simt {

// Each lambda has a type of its own, so `Declaration` distinguishes declarations, and
// instantiations of the template that contains them. The function is not inlined: ThreadSanitizer
// records only calls of instrumented functions, and its reports would lose the line of the
// declaration.
template <class T, std::size_t count, class Declaration>
[[gnu::noinline]] T (&shared_array(Declaration)) [count] {
  static constexpr char key = 0;
  return *static_cast<T(*)[count]>(runtime::shared_array(&key, sizeof(T[count]), alignof(T)));
}

}  // namespace simt

// Declares the block's array `name`, in its own heap allocation: AddressSanitizer guards both ends
// and reports this line as the one that allocated it. The array holds NaNs (all bits set) when the
// block starts.
#define AMPFUSE_SHARED(type, name, count) \
  type(&name)[count] = ::simt::shared_array<type, (count)>([] {})

// Declares `name` as the dynamic shared memory of the launch. Every such declaration in a kernel
// refers to the same memory.
#define AMPFUSE_DYNAMIC_SHARED(type, name) \
  type* const name = static_cast<type*>(::simt::runtime::dynamic_shared_array())
