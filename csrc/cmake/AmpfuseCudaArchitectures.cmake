# Sets CMAKE_CUDA_ARCHITECTURES: to TORCH_CUDA_ARCH_LIST ("8.0 9.0+PTX") if that is set, else to the
# value that the caller gave. Otherwise AMPFUSE_WITH_CUDA=AUTO uses the GPUs of this machine, and ON
# uses all architectures that torch was built for. In CMake's notation 80-real means machine code
# only, and 90 means machine code and PTX. The result is not cached: each configuration decides
# again.

execute_process(COMMAND "${AMPFUSE_NVCC}" --list-gpu-arch OUTPUT_VARIABLE _ampfuse_text)
string(REGEX MATCHALL "[0-9]+" _ampfuse_compilable "${_ampfuse_text}")

if(NOT "$ENV{TORCH_CUDA_ARCH_LIST}" STREQUAL "")
  string(REGEX MATCHALL "[^ ;,]+" _ampfuse_archs "$ENV{TORCH_CUDA_ARCH_LIST}")
  set(_ampfuse_wanted "")
  foreach(_ampfuse_arch IN LISTS _ampfuse_archs)
    if(NOT _ampfuse_arch MATCHES "^([0-9]+)\\.([0-9])([af]?)(\\+PTX)?$")
      message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST: expected entries like 9.0 or 9.0+PTX, got "
                          "\"$ENV{TORCH_CUDA_ARCH_LIST}\"")
    endif()
    set(_ampfuse_number "${CMAKE_MATCH_1}${CMAKE_MATCH_2}")
    set(_ampfuse_kind "${CMAKE_MATCH_3}")
    if(NOT CMAKE_MATCH_4)
      string(APPEND _ampfuse_kind "-real")
    endif()
    if(NOT _ampfuse_number IN_LIST _ampfuse_compilable)
      list(JOIN _ampfuse_compilable ", " _ampfuse_compilable)
      message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST: expected architectures that CUDA "
                          "${AMPFUSE_CUDA_VERSION} supports (${_ampfuse_compilable}), got ${_ampfuse_arch}")
    endif()
    list(APPEND _ampfuse_wanted "${_ampfuse_number}${_ampfuse_kind}")
  endforeach()
  set(CMAKE_CUDA_ARCHITECTURES "${_ampfuse_wanted}")
elseif(NOT CMAKE_CUDA_ARCHITECTURES AND AMPFUSE_WITH_CUDA STREQUAL "AUTO")
  set(_ampfuse_wanted "")
  foreach(_ampfuse_arch IN LISTS _ampfuse_gpus)
    string(REPLACE "." "" _ampfuse_number "${_ampfuse_arch}")
    if(_ampfuse_number IN_LIST _ampfuse_compilable)
      list(APPEND _ampfuse_wanted "${_ampfuse_number}-real")
    else()
      message(NOTICE "ampfuse: CUDA ${AMPFUSE_CUDA_VERSION} does not compile for the GPU of compute "
                     "capability ${_ampfuse_arch} that is here")
    endif()
  endforeach()
  if(NOT _ampfuse_wanted)
    set(_ampfuse_refusal "CUDA ${AMPFUSE_CUDA_VERSION} does not compile for any GPU that is here")
    if(NOT AMPFUSE_CUDA_VERSION VERSION_LESS AMPFUSE_TORCH_CUDA)
      set(_ampfuse_because "")  # no error, since torch does not support these GPUs either
    endif()
  endif()
  set(CMAKE_CUDA_ARCHITECTURES "${_ampfuse_wanted}")
elseif(NOT CMAKE_CUDA_ARCHITECTURES)
  string(REGEX MATCHALL "[0-9]+" _ampfuse_archs "${AMPFUSE_TORCH_ARCHS}")
  if(NOT _ampfuse_archs)
    set(_ampfuse_archs 75 80 86 90 100 120)  # those of torch's wheels for CUDA 13
  endif()
  set(_ampfuse_wanted "")
  foreach(_ampfuse_arch IN LISTS _ampfuse_archs)
    if(_ampfuse_arch IN_LIST _ampfuse_compilable AND _ampfuse_arch GREATER_EQUAL 70)
      list(APPEND _ampfuse_wanted "${_ampfuse_arch}-real")
    elseif(_ampfuse_arch GREATER 90)
      message(NOTICE "ampfuse: CUDA ${AMPFUSE_CUDA_VERSION} does not compile for sm_${_ampfuse_arch}: "
                     "such GPUs compile the newest PTX when they load it")
    endif()
  endforeach()
  # The newest architecture also gets PTX, for GPUs that are newer still.
  list(SORT _ampfuse_wanted COMPARE NATURAL)
  list(REMOVE_DUPLICATES _ampfuse_wanted)
  list(POP_BACK _ampfuse_wanted _ampfuse_last)
  string(REPLACE "-real" "" _ampfuse_last "${_ampfuse_last}")
  list(APPEND _ampfuse_wanted "${_ampfuse_last}")
  set(CMAKE_CUDA_ARCHITECTURES "${_ampfuse_wanted}")
endif()
