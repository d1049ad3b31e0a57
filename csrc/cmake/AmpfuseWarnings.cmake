# How our own sources are compiled: several at a time, with warnings, which are errors unless
# CMAKE_COMPILE_WARNING_AS_ERROR is off, and threads through OpenMP.

find_package(OpenMP REQUIRED COMPONENTS CXX)

function(ampfuse_own_sources target)
  # Torch's headers take 6 s of a small file's 7, and 12 of one that has optimizers or autograd. So
  # eight files that read them once take a sixth of the time. Names in anonymous namespaces are
  # shared by the files of a batch, and must differ.
  set_target_properties(
    ${target}
    PROPERTIES UNITY_BUILD ${AMPFUSE_UNITY}
               UNITY_BUILD_BATCH_SIZE 8
               UNITY_BUILD_RELATIVE_PATHS ON)  # for ccache, to which other folders are others
  get_target_property(sources ${target} SOURCES)
  list(FILTER sources INCLUDE REGEX "\\.cu$")  # whose time is their own
  set_source_files_properties(${sources} PROPERTIES SKIP_UNITY_BUILD_INCLUSION ON)
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
