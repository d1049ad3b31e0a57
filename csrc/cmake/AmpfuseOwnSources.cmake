# Compiler settings of ampfuse's own sources: several are compiled at a time, with warnings (errors
# unless CMAKE_COMPILE_WARNING_AS_ERROR is off) and with OpenMP for threads.

find_package(OpenMP REQUIRED COMPONENTS CXX)

# Replaces a target's C++ and CUDA sources with batches: files that include up to ten sources of
# one language each. Torch's headers take 6 of the 7 seconds that a small C++ file takes to compile,
# and 12 in a file that includes optimizers or autograd. nvcc reads the headers of a CUDA file once
# per architecture. The sources of a batch share one anonymous namespace, so the names in it must differ. CMake's own
# UNITY_BUILD includes by absolute path, which makes ccache miss the batches of another checkout.
function(ampfuse_in_batches target)
  get_target_property(sources ${target} SOURCES)
  set(cpp_sources "")
  set(cu_sources "")
  set(all "")
  foreach(source IN LISTS sources)
    get_source_file_property(alone ${source} SKIP_UNITY_BUILD_INCLUSION)
    if(source MATCHES "\\.(cpp|cu)$" AND NOT alone)
      list(APPEND ${CMAKE_MATCH_1}_sources ${source})
    else()
      list(APPEND all ${source})
    endif()
  endforeach()
  set(folder ${PROJECT_BINARY_DIR}/batches)
  file(MAKE_DIRECTORY ${folder})
  file(REAL_PATH ${folder} folder)  # if it is a link, "../" leads elsewhere
  foreach(extension cpp cu)
    list(LENGTH ${extension}_sources count)
    if(count EQUAL 0)
      continue()
    endif()
    # All but the last have ten, so that more sources at the end of the list leave the others as they
    # are in ccache: a build with CUDA has them.
    math(EXPR last "(${count} - 1) / 10")
    foreach(number RANGE 0 ${last})
      math(EXPR start "${number} * 10")
      list(SUBLIST ${extension}_sources ${start} 10 batch)
      set(includes "")
      foreach(source IN LISTS batch)
        file(REAL_PATH ${source} source)
        file(RELATIVE_PATH source ${folder} ${source})
        string(APPEND includes "#include \"${source}\"\n")
      endforeach()
      math(EXPR number "${number} + 1")
      set(file ${folder}/${target}_${number}.${extension})
      file(CONFIGURE OUTPUT ${file} CONTENT "${includes}" @ONLY)
      list(APPEND all ${file})
    endforeach()
  endforeach()
  set_target_properties(${target} PROPERTIES SOURCES "${all}")
endfunction()

# Precompiles headers of torch for a target. They take half a gigabyte, which ccache would hash for
# each source, in a second. If CCACHE_PCH_EXTSUM is set, it reads what is in the file `.sum` instead:
# which headers, of which torch. It does not notice an edit of torch's headers in place.
function(ampfuse_precompile_torch target)
  target_precompile_headers(${target} PRIVATE ${ARGN})
  set(sum "${ARGN}\n")
  foreach(file version.py build-version build-hash)  # of torch for Python, or of LibTorch
    if(EXISTS ${AMPFUSE_TORCH_ROOT}/${file})
      file(READ ${AMPFUSE_TORCH_ROOT}/${file} version)
      string(APPEND sum "${version}")
    endif()
  endforeach()
  set(header ${CMAKE_CURRENT_BINARY_DIR}/CMakeFiles/${target}.dir/cmake_pch.hxx)
  file(WRITE ${header}.gch.sum "${sum}")
endfunction()

function(ampfuse_own_sources target)
  if(AMPFUSE_UNITY)
    ampfuse_in_batches(${target})
  endif()
  # Without -fopenmp, at::parallel_for (a header) runs serially and does not warn.
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
