# How our own sources are compiled: several at a time, with warnings, which are errors unless
# CMAKE_COMPILE_WARNING_AS_ERROR is off, and threads through OpenMP.

find_package(OpenMP REQUIRED COMPONENTS CXX)

# Replaces a target's C++ sources by files that include up to eight of them each. Torch's headers take
# 6 s of a small file's 7, and 12 of one that has optimizers or autograd. Names in anonymous namespaces
# are shared by the files of a batch, and must differ. CMake's own UNITY_BUILD includes by absolute
# paths: for ccache the batches of another checkout would be other files.
function(ampfuse_in_batches target)
  get_target_property(sources ${target} SOURCES)
  set(others "")
  set(batched "")
  foreach(source IN LISTS sources)
    get_source_file_property(alone ${source} SKIP_UNITY_BUILD_INCLUSION)
    if(source MATCHES "\\.cpp$" AND NOT alone)
      list(APPEND batched ${source})
    else()
      list(APPEND others ${source})
    endif()
  endforeach()
  list(LENGTH batched count)
  math(EXPR batches "(${count} + 7) / 8")
  math(EXPR size "(${count} + ${batches} - 1) / ${batches}")
  set(folder ${PROJECT_BINARY_DIR}/batches)
  file(MAKE_DIRECTORY ${folder})
  file(REAL_PATH ${folder} folder)  # "../" of a folder behind a link is not what its path says
  foreach(number RANGE 1 ${batches})
    math(EXPR start "(${number} - 1) * ${size}")
    list(SUBLIST batched ${start} ${size} sources)
    set(includes "")
    foreach(source IN LISTS sources)
      file(REAL_PATH ${source} source)
      file(RELATIVE_PATH source ${folder} ${source})
      string(APPEND includes "#include \"${source}\"\n")
    endforeach()
    file(CONFIGURE OUTPUT ${folder}/${target}_${number}.cpp CONTENT "${includes}" @ONLY)
    list(APPEND others ${folder}/${target}_${number}.cpp)
  endforeach()
  set_target_properties(${target} PROPERTIES SOURCES "${others}")
endfunction()

function(ampfuse_own_sources target)
  if(AMPFUSE_UNITY)
    ampfuse_in_batches(${target})
  endif()
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
