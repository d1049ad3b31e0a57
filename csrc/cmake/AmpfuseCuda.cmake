# Decides whether the CUDA kernels are built (AMPFUSE_CUDA) and for which architectures.
#
# nvcc is looked for in CMAKE_CUDA_COMPILER, CUDACXX, CUDA_HOME, PATH, /usr/local/cuda, and among the
# CUDA packages that pip installs beside torch.

set(AMPFUSE_CUDA OFF)
set(AMPFUSE_CUDA_VERSION "")
set(_ampfuse_refusal "")

if(NOT AMPFUSE_WITH_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "AMPFUSE_WITH_CUDA: expected AUTO, ON or OFF, got ${AMPFUSE_WITH_CUDA}")
elseif(AMPFUSE_WITH_CUDA STREQUAL "OFF")
  set(_ampfuse_refusal "it was switched off")
elseif(NOT AMPFUSE_TORCH_CUDA)
  set(_ampfuse_refusal "torch ${AMPFUSE_TORCH_VERSION} is a CPU build")
else()
  # The first nvcc of torch's CUDA version, else the first of its major version, with which minor
  # releases are compatible.
  string(REGEX MATCH "^[0-9]+" AMPFUSE_CUDA_MAJOR "${AMPFUSE_TORCH_CUDA}")
  get_filename_component(_ampfuse_chosen "${CMAKE_CUDA_COMPILER}" DIRECTORY)
  get_filename_component(_ampfuse_cudacxx "$ENV{CUDACXX}" DIRECTORY)
  find_program(_ampfuse_on_path nvcc NO_CACHE)
  get_filename_component(_ampfuse_on_path "${_ampfuse_on_path}" DIRECTORY)
  set(_ampfuse_seen "")
  foreach(_ampfuse_wanted "^${AMPFUSE_TORCH_CUDA}$" "^${AMPFUSE_CUDA_MAJOR}\\.")
    foreach(_ampfuse_folder IN ITEMS "${_ampfuse_chosen}" "${_ampfuse_cudacxx}" "$ENV{CUDA_HOME}/bin"
                                     "${_ampfuse_on_path}" /usr/local/cuda/bin
                                     "${AMPFUSE_TORCH_ROOT}/../nvidia/cu${AMPFUSE_CUDA_MAJOR}/bin")
      unset(_ampfuse_nvcc)
      find_program(_ampfuse_nvcc nvcc PATHS "${_ampfuse_folder}" NO_DEFAULT_PATH NO_CACHE)
      if(NOT _ampfuse_nvcc OR AMPFUSE_CUDA_VERSION)
        continue()
      endif()
      execute_process(COMMAND "${_ampfuse_nvcc}" --version OUTPUT_VARIABLE _ampfuse_text ERROR_QUIET)
      string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" _ "${_ampfuse_text}")
      set(_ampfuse_version "${CMAKE_MATCH_1}")
      list(APPEND _ampfuse_seen "${_ampfuse_nvcc} is of CUDA ${_ampfuse_version}")
      if(_ampfuse_version MATCHES "${_ampfuse_wanted}")
        set(AMPFUSE_NVCC "${_ampfuse_nvcc}")
        set(AMPFUSE_CUDA_VERSION "${_ampfuse_version}")
      endif()
    endforeach()
  endforeach()
  if(NOT _ampfuse_seen)
    set(_ampfuse_refusal "no nvcc was found")
  elseif(NOT AMPFUSE_CUDA_VERSION)
    list(REMOVE_DUPLICATES _ampfuse_seen)
    list(JOIN _ampfuse_seen ", " _ampfuse_seen)
    set(_ampfuse_refusal
        "torch ${AMPFUSE_TORCH_VERSION} is built for CUDA ${AMPFUSE_TORCH_CUDA}, but ${_ampfuse_seen}")
  elseif(AMPFUSE_CUDA_VERSION VERSION_LESS 12.6)
    set(_ampfuse_refusal "CUDA 12.6 or newer is needed, but ${AMPFUSE_NVCC} is of CUDA ${AMPFUSE_CUDA_VERSION}")
  endif()
endif()

if(NOT _ampfuse_refusal)
  # TORCH_CUDA_ARCH_LIST wins ("8.0 9.0+PTX"), then CMAKE_CUDA_ARCHITECTURES, then what torch itself
  # was built for. CMake wants 80-real for machine code alone and 90 for machine code and PTX.
  if(DEFINED ENV{TORCH_CUDA_ARCH_LIST} AND NOT "$ENV{TORCH_CUDA_ARCH_LIST}" STREQUAL "")
    string(REGEX MATCHALL "[^ ;,]+" _ampfuse_archs "$ENV{TORCH_CUDA_ARCH_LIST}")
    list(TRANSFORM _ampfuse_archs REPLACE "^([0-9]+)\\.([0-9]+a?)(.*)$" "\\1\\2\\3")
    list(TRANSFORM _ampfuse_archs REPLACE "^([0-9]+a?)$" "\\1-real")
    list(TRANSFORM _ampfuse_archs REPLACE "\\+PTX$" "")
    foreach(_ampfuse_arch IN LISTS _ampfuse_archs)
      if(NOT _ampfuse_arch MATCHES "^[0-9]+a?(-real)?$")
        message(FATAL_ERROR "TORCH_CUDA_ARCH_LIST: expected entries like 9.0 or 9.0+PTX, got "
                            "\"$ENV{TORCH_CUDA_ARCH_LIST}\"")
      endif()
    endforeach()
    set(CMAKE_CUDA_ARCHITECTURES "${_ampfuse_archs}" CACHE STRING "" FORCE)
  elseif(NOT CMAKE_CUDA_ARCHITECTURES)
    # As in torch's wheels for CUDA 13; the last one brings PTX for what comes after it.
    set(CMAKE_CUDA_ARCHITECTURES "75-real;80-real;86-real;90-real;100-real;120" CACHE STRING "")
  endif()

  set(CMAKE_CUDA_COMPILER "${AMPFUSE_NVCC}" CACHE FILEPATH "")
  cmake_path(SET _ampfuse_toolkit NORMALIZE "${AMPFUSE_NVCC}/../..")
  set(_ampfuse_libraries "${AMPFUSE_TORCH_ROOT}/../nvidia/cu${AMPFUSE_CUDA_MAJOR}/lib"
                         "${_ampfuse_toolkit}/lib64" "${_ampfuse_toolkit}/lib")
  if(NOT EXISTS "${_ampfuse_toolkit}/lib64")
    # pip's packages: nvcc looks in lib64 for what CMake's trial program links, and it is in lib.
    string(APPEND CMAKE_CUDA_FLAGS " -L${_ampfuse_toolkit}/lib")
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  enable_language(CUDA)

  # The runtime library is linked by its path, and torch's own where there is one: pip's package has
  # libcudart.so.13 without the libcudart.so that -lcudart means.
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)
  find_library(AMPFUSE_CUDART NAMES libcudart.so.${AMPFUSE_CUDA_MAJOR} cudart
               PATHS ${_ampfuse_libraries} NO_DEFAULT_PATH REQUIRED)
  set(AMPFUSE_CUDA ON)
  message(STATUS "ampfuse: CUDA ${AMPFUSE_CUDA_VERSION} kernels for ${CMAKE_CUDA_ARCHITECTURES} "
                 "(torch ${AMPFUSE_TORCH_VERSION}, CUDA ${AMPFUSE_TORCH_CUDA})")
elseif(AMPFUSE_WITH_CUDA STREQUAL "ON")
  message(FATAL_ERROR "ampfuse: AMPFUSE_WITH_CUDA is ON, but ${_ampfuse_refusal}.")
else()
  set(AMPFUSE_CUDA_VERSION "")
  message(STATUS "ampfuse: no CUDA kernels: ${_ampfuse_refusal} (torch ${AMPFUSE_TORCH_VERSION})")
endif()
