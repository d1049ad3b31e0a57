# Decides whether the CUDA kernels are built (AMPFUSE_CUDA) and for which architectures.
#
# AUTO builds them for the architectures in TORCH_CUDA_ARCH_LIST or CMAKE_CUDA_ARCHITECTURES, else
# for the GPUs of this machine: those in AMPFUSE_GPUS, else those that nvidia-smi reports. It builds
# no kernels if all of these are empty or torch is a CPU build. If kernels are wanted but cannot be
# built, configuration stops and prints the remedies.
#
# nvcc is that of CMAKE_CUDA_COMPILER, or is searched for in CUDACXX, CUDA_HOME, PATH,
# /usr/local/cuda, and in the CUDA packages of pip: those beside torch and those in
# AMPFUSE_NVIDIA_PACKAGES. It has torch's CUDA version, else the same major version, else one from
# 12.6 on that is older than torch's.

set(AMPFUSE_NVIDIA_PACKAGES "" CACHE STRING "Folders named nvidia that contain CUDA packages of pip")
set(AMPFUSE_GPUS "" CACHE STRING "Compute capabilities of the GPUs that torch sees (9.0;8.6)")
set(AMPFUSE_TORCH_ARCHS "" CACHE STRING "What torch was built for, as torch._C._cuda_getArchFlags()")
option(AMPFUSE_FETCH_NVCC "Install nvcc from Python packages if none of torch's CUDA major is here" OFF)
set(AMPFUSE_CUDA_LIBRARY "" CACHE FILEPATH "A libampfuse_cuda of the same sources: no kernels are compiled")
set(AMPFUSE_CUDA OFF)
set(AMPFUSE_CUDA_VERSION "")
if(AMPFUSE_CUDA_LIBRARY AND NOT AMPFUSE_WITH_CUDA STREQUAL "OFF")
  if(NOT EXISTS "${AMPFUSE_CUDA_LIBRARY}")
    message(FATAL_ERROR "AMPFUSE_CUDA_LIBRARY: there is no ${AMPFUSE_CUDA_LIBRARY}")
  endif()
  set(AMPFUSE_CUDA ON)
  message(NOTICE "ampfuse: CUDA kernels of ${AMPFUSE_CUDA_LIBRARY}")
  return()
endif()

# Sets _ampfuse_version to the CUDA version of a compiler; empty if it reports none.
macro(_ampfuse_ask_version compiler)
  execute_process(COMMAND "${compiler}" --version OUTPUT_VARIABLE _ampfuse_text ERROR_QUIET)
  string(REGEX MATCH "release ([0-9]+\\.[0-9]+)" _ "${_ampfuse_text}")
  set(_ampfuse_version "${CMAKE_MATCH_1}")
endmacro()

# Sets AMPFUSE_NVCC and AMPFUSE_CUDA_VERSION to the first nvcc whose version matches one of the
# expressions, which are tried in turn; "older" is CUDA 12.6 or newer, but older than torch's.
# _ampfuse_seen lists every nvcc that was examined.
macro(_ampfuse_find_nvcc)
  get_filename_component(_ampfuse_cudacxx "$ENV{CUDACXX}" DIRECTORY)
  unset(_ampfuse_on_path)
  find_program(_ampfuse_on_path nvcc NO_CACHE)
  get_filename_component(_ampfuse_on_path "${_ampfuse_on_path}" DIRECTORY)
  set(_ampfuse_packages "${AMPFUSE_TORCH_ROOT}/../nvidia" ${AMPFUSE_NVIDIA_PACKAGES})
  list(TRANSFORM _ampfuse_packages APPEND "/cu${AMPFUSE_CUDA_MAJOR}/bin"
       OUTPUT_VARIABLE _ampfuse_package_folders)
  set(_ampfuse_seen "")
  foreach(_ampfuse_wanted ${ARGN})
    foreach(_ampfuse_folder IN ITEMS "${_ampfuse_cudacxx}" "$ENV{CUDA_HOME}/bin"
                                     "${_ampfuse_on_path}" /usr/local/cuda/bin
                                     ${_ampfuse_package_folders})
      unset(_ampfuse_nvcc)
      find_program(_ampfuse_nvcc nvcc PATHS "${_ampfuse_folder}" NO_DEFAULT_PATH NO_CACHE)
      if(NOT _ampfuse_nvcc OR AMPFUSE_CUDA_VERSION)
        continue()
      endif()
      _ampfuse_ask_version("${_ampfuse_nvcc}")
      list(APPEND _ampfuse_seen "${_ampfuse_nvcc} has CUDA ${_ampfuse_version}")
      if(_ampfuse_version MATCHES "${_ampfuse_wanted}"
         OR (_ampfuse_wanted STREQUAL "older" AND _ampfuse_version VERSION_GREATER_EQUAL 12.6
             AND _ampfuse_version VERSION_LESS AMPFUSE_TORCH_CUDA))
        set(AMPFUSE_NVCC "${_ampfuse_nvcc}")
        set(AMPFUSE_CUDA_VERSION "${_ampfuse_version}")
      endif()
    endforeach()
  endforeach()
  list(REMOVE_DUPLICATES _ampfuse_seen)
endmacro()

# --- Are kernels wanted? _ampfuse_because is the reason, _ampfuse_refusal why none are built. -----

set(_ampfuse_because "")
set(_ampfuse_refusal "")
set(_ampfuse_gpus "${AMPFUSE_GPUS}")
find_program(_ampfuse_smi nvidia-smi NO_CACHE)
if(_ampfuse_smi AND NOT _ampfuse_gpus AND AMPFUSE_WITH_CUDA STREQUAL "AUTO")
  execute_process(COMMAND "${_ampfuse_smi}" --query-gpu=compute_cap --format=csv,noheader TIMEOUT 20
                  OUTPUT_VARIABLE _ampfuse_text RESULT_VARIABLE _ampfuse_failed ERROR_QUIET)
  if(_ampfuse_failed EQUAL 0)  # the text of a failure may contain version numbers
    string(REGEX MATCHALL "[0-9]+\\.[0-9]+" _ampfuse_gpus "${_ampfuse_text}")
    list(REMOVE_DUPLICATES _ampfuse_gpus)
  endif()
endif()
list(JOIN _ampfuse_gpus ", " _ampfuse_gpus_text)

if(NOT AMPFUSE_WITH_CUDA MATCHES "^(AUTO|ON|OFF)$")
  message(FATAL_ERROR "AMPFUSE_WITH_CUDA: expected AUTO, ON or OFF, got ${AMPFUSE_WITH_CUDA}")
elseif(AMPFUSE_WITH_CUDA STREQUAL "OFF")
  set(_ampfuse_refusal "it was switched off")
elseif(AMPFUSE_WITH_CUDA STREQUAL "ON")
  set(_ampfuse_because "AMPFUSE_WITH_CUDA is ON")
elseif(NOT AMPFUSE_TORCH_CUDA)
  # With a CPU build of torch, AUTO builds no kernels and reports no error.
elseif(NOT "$ENV{TORCH_CUDA_ARCH_LIST}" STREQUAL "")
  set(_ampfuse_because "TORCH_CUDA_ARCH_LIST is $ENV{TORCH_CUDA_ARCH_LIST}")
elseif(CMAKE_CUDA_ARCHITECTURES)
  set(_ampfuse_because "CMAKE_CUDA_ARCHITECTURES is ${CMAKE_CUDA_ARCHITECTURES}")
elseif(_ampfuse_gpus)
  set(_ampfuse_because "there is a GPU here, of compute capability ${_ampfuse_gpus_text}")
else()
  set(_ampfuse_refusal "there is no GPU here, and TORCH_CUDA_ARCH_LIST names none")
endif()

# --- Choice of nvcc and of the architectures ------------------------------------------------------

if(NOT _ampfuse_refusal AND NOT AMPFUSE_TORCH_CUDA)
  set(_ampfuse_refusal "torch ${AMPFUSE_TORCH_VERSION} is a CPU build")
elseif(NOT _ampfuse_refusal)
  string(REGEX MATCH "^[0-9]+" AMPFUSE_CUDA_MAJOR "${AMPFUSE_TORCH_CUDA}")
  set(_ampfuse_unfetched "")
  set(_ampfuse_wanted_versions "^${AMPFUSE_TORCH_CUDA}$" "^${AMPFUSE_CUDA_MAJOR}\\.")
  # The compiler of the option, or of an earlier configuration: CMake does not change it any more.
  _ampfuse_ask_version("${CMAKE_CUDA_COMPILER}")
  if(CMAKE_CUDA_COMPILER AND _ampfuse_version)
    set(_ampfuse_seen "${CMAKE_CUDA_COMPILER} has CUDA ${_ampfuse_version}")
    set(AMPFUSE_NVCC "${CMAKE_CUDA_COMPILER}")
    set(AMPFUSE_CUDA_VERSION "${_ampfuse_version}")
    string(REGEX MATCH "^[0-9]+" _ampfuse_major "${_ampfuse_version}")
    if(_ampfuse_major GREATER AMPFUSE_CUDA_MAJOR)
      message(FATAL_ERROR
        "CMAKE_CUDA_COMPILER: expected CUDA ${AMPFUSE_CUDA_MAJOR}, as torch's, or older, got "
        "${CMAKE_CUDA_COMPILER} with CUDA ${_ampfuse_version}; remove the option, or the build folder")
    endif()
  else()
    _ampfuse_find_nvcc(${_ampfuse_wanted_versions})
  endif()
  if(NOT AMPFUSE_CUDA_VERSION AND AMPFUSE_FETCH_NVCC)
    find_package(Python REQUIRED COMPONENTS Interpreter)
    execute_process(COMMAND ${Python_EXECUTABLE} ${PROJECT_SOURCE_DIR}/tools/fetch_nvcc.py
                            ${AMPFUSE_TORCH_CUDA} RESULT_VARIABLE _ampfuse_failed)
    if(_ampfuse_failed)
      set(_ampfuse_unfetched ", and none could be fetched (see above)")
    endif()
    list(APPEND AMPFUSE_NVIDIA_PACKAGES "${Python_SITELIB}/nvidia")  # torch may be elsewhere
    _ampfuse_find_nvcc(${_ampfuse_wanted_versions})
  endif()
  if(NOT AMPFUSE_CUDA_VERSION)  # a driver that runs torch also runs the kernels of an older CUDA
    _ampfuse_find_nvcc(older)
  endif()
  if(NOT _ampfuse_seen)
    set(_ampfuse_refusal "no nvcc was found${_ampfuse_unfetched}")
  elseif(NOT AMPFUSE_CUDA_VERSION)
    list(JOIN _ampfuse_seen ", " _ampfuse_seen)
    set(_ampfuse_refusal
        "torch ${AMPFUSE_TORCH_VERSION} is built for CUDA ${AMPFUSE_TORCH_CUDA}, but ${_ampfuse_seen}${_ampfuse_unfetched}")
  elseif(AMPFUSE_CUDA_VERSION VERSION_LESS 12.6)
    set(_ampfuse_refusal "CUDA 12.6 or newer is needed, but ${AMPFUSE_NVCC} has CUDA ${AMPFUSE_CUDA_VERSION}")
  endif()
endif()

if(NOT _ampfuse_refusal)
  include(AmpfuseCudaArchitectures)
endif()
if(NOT _ampfuse_refusal)
  set(CMAKE_CUDA_COMPILER "${AMPFUSE_NVCC}" CACHE FILEPATH "")
  cmake_path(SET _ampfuse_toolkit NORMALIZE "${AMPFUSE_NVCC}/../..")
  if(NOT EXISTS "${_ampfuse_toolkit}/lib64" AND EXISTS "${_ampfuse_toolkit}/lib")
    # pip's packages have their libraries in lib, but nvcc links CMake's trial program with lib64.
    if(NOT DEFINED CMAKE_CUDA_FLAGS)
      set(CMAKE_CUDA_FLAGS "$ENV{CUDAFLAGS}")
    endif()
    string(APPEND CMAKE_CUDA_FLAGS " -L${_ampfuse_toolkit}/lib")
  endif()
  set(CMAKE_CUDA_STANDARD 20)
  set(CMAKE_CUDA_STANDARD_REQUIRED ON)
  enable_language(CUDA)

  # CMake would search for the static runtime in lib64 only.
  set(CMAKE_CUDA_RUNTIME_LIBRARY None)
  set(_ampfuse_packages "${AMPFUSE_TORCH_ROOT}/../nvidia" ${AMPFUSE_NVIDIA_PACKAGES})
  list(TRANSFORM _ampfuse_packages APPEND "/cu${AMPFUSE_CUDA_MAJOR}/lib")
  unset(AMPFUSE_CUDART)
  find_library(AMPFUSE_CUDART NAMES libcudart_static.a NO_CACHE NO_DEFAULT_PATH
               PATHS "${_ampfuse_toolkit}/lib64" "${_ampfuse_toolkit}/lib" ${_ampfuse_packages}
                     ${CMAKE_CUDA_HOST_IMPLICIT_LINK_DIRECTORIES})
  if(NOT AMPFUSE_CUDART)
    set(_ampfuse_refusal "libcudart_static.a is neither in ${_ampfuse_toolkit} nor beside torch")
  endif()
endif()

if(NOT _ampfuse_refusal)
  set(AMPFUSE_CUDA ON)
  message(NOTICE "ampfuse: CUDA ${AMPFUSE_CUDA_VERSION} kernels for ${CMAKE_CUDA_ARCHITECTURES} "
                 "(torch ${AMPFUSE_TORCH_VERSION}, CUDA ${AMPFUSE_TORCH_CUDA})")
elseif(NOT _ampfuse_because)
  message(NOTICE "ampfuse: no CUDA kernels: ${_ampfuse_refusal}")
else()
  set(_ampfuse_remedies "")
  if(AMPFUSE_CUDA_MAJOR GREATER_EQUAL 13 AND NOT AMPFUSE_FETCH_NVCC)
    string(APPEND _ampfuse_remedies "\n  - have nvcc fetched from Python packages: AMPFUSE_FETCH_NVCC=ON")
  endif()
  if(AMPFUSE_TORCH_CUDA)
    string(APPEND _ampfuse_remedies "\n  - install the toolkit of CUDA ${AMPFUSE_TORCH_CUDA}, "
                                    "and set CUDA_HOME to its folder")
  endif()
  string(APPEND _ampfuse_remedies "\n  - leave the kernels out: AMPFUSE_WITH_CUDA=OFF")
  message(FATAL_ERROR "ampfuse: CUDA kernels are wanted, since ${_ampfuse_because}, but "
                      "${_ampfuse_refusal}. Do one of these, and build again:${_ampfuse_remedies}")
endif()
