// The sanitizer that the kernels are compiled with, and its fiber interface.
//
// CMake defines SIMT_ASAN or SIMT_TSAN. The compiler's own macros are not set here, because the
// runtime itself is compiled without a sanitizer: all fibers share its variables on purpose. Calls
// are inside `if constexpr`, so that functions of the other sanitizer need not be linked.
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

extern "C" {  // exported by the library, but not declared in gcc 12's headers
void __tsan_ignore_thread_begin();
void __tsan_ignore_thread_end();
}
