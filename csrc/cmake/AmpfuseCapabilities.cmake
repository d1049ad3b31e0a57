# Compiles sources under cpu/vec/ once per instruction set, each time into its own namespace
# (csrc/cpu/capability.h). The flags are torch's, and select the code in its at::vec headers.

function(ampfuse_add_vec_sources target)
  set(capabilities DEFAULT)
  set(x86 "")
  if(CMAKE_SYSTEM_PROCESSOR MATCHES "x86_64|AMD64")
    list(APPEND capabilities AVX2 AVX512)
    set(x86 AMPFUSE_X86)
    target_compile_definitions(${target} PRIVATE ${x86})
  endif()
  set(flags_DEFAULT "")
  set(flags_AVX2 -DCPU_CAPABILITY_AVX2 -mavx2 -mfma -mf16c)
  set(flags_AVX512 -DCPU_CAPABILITY_AVX512 -mavx512f -mavx512bw -mavx512vl -mavx512dq -mfma -mf16c)
  foreach(capability IN LISTS capabilities)
    set(object ${target}_vec_${capability})
    add_library(${object} OBJECT ${ARGN})
    target_compile_definitions(${object} PRIVATE CPU_CAPABILITY=${capability} ${x86})
    # The compiler must not contract products and sums into fused multiply-adds, so that results
    # do not depend on how it transforms a loop. A formula that needs one calls it explicitly.
    target_compile_options(${object} PRIVATE ${flags_${capability}} -fno-math-errno
                                             -fno-trapping-math -ffp-contract=off)
    target_link_libraries(${object} PRIVATE ampfuse::torch)
    set_target_properties(${object} PROPERTIES POSITION_INDEPENDENT_CODE ON
                                               CXX_VISIBILITY_PRESET hidden
                                               VISIBILITY_INLINES_HIDDEN ON)
    ampfuse_own_sources(${object})
    if(CMAKE_CXX_COMPILER_ID STREQUAL "GNU")
      # gcc 12 warns about the deliberately undefined operands in its own AVX-512 headers. It also
      # reports each vector that is passed by value, because gcc 4.6 passed vectors differently.
      target_compile_options(${object} PRIVATE -Wno-maybe-uninitialized -Wno-uninitialized
                                               -Wno-psabi)
    endif()
    target_sources(${target} PRIVATE $<TARGET_OBJECTS:${object}>)
  endforeach()
endfunction()
