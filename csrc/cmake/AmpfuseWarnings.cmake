# How our own sources are compiled: with warnings, which are errors unless CMAKE_COMPILE_WARNING_AS_ERROR
# is off, and threads through OpenMP.

find_package(OpenMP REQUIRED COMPONENTS CXX)

function(ampfuse_own_sources target)
  # at::parallel_for is a header that runs serially, and says nothing, without -fopenmp.
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:${OpenMP_CXX_FLAGS}>)
  target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CXX>:-Wall;-Wextra>
                                           $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Wall,-Wextra>)
  if(CMAKE_COMPILE_WARNING_AS_ERROR)
    # CMake's own -Werror all-warnings is for nvcc and does not reach the host compiler.
    target_compile_options(${target} PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:-Xcompiler=-Werror>)
  endif()
  if(AMPFUSE_SANITIZE)
    target_compile_options(${target} PRIVATE
                           $<$<COMPILE_LANGUAGE:CXX>:-fsanitize=address,undefined;-fno-omit-frame-pointer>)
    target_link_options(${target} PRIVATE -fsanitize=address,undefined)
  endif()
endfunction()
