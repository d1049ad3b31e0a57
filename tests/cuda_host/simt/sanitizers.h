// Which sanitizer the kernels are compiled with, and its fiber interface.
//
// CMake says which one: the runtime itself is compiled without any, because its variables are
// shared by all fibers on purpose, so the compiler's own macros say nothing here. Calls stand
// behind `if constexpr`, which leaves nothing to link for the other one.
#pragma once

#include <sanitizer/asan_interface.h>
#include <sanitizer/common_interface_defs.h>
#include <sanitizer/tsan_interface.h>

#ifdef SIMT_ASAN
inline constexpr bool kAsan = true;
#else
inline constexpr bool kAsan = false;
#endif

#ifdef SIMT_TSAN
inline constexpr bool kTsan = true;
#else
inline constexpr bool kTsan = false;
#endif

extern "C" {  // exported by the library, declared in none of gcc 12's headers
void __tsan_ignore_thread_begin();
void __tsan_ignore_thread_end();
}
