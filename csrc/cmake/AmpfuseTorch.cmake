# Finds torch and defines the target ampfuse::torch for it. The build includes this file, and
# find_package(ampfuse) includes the installed copy.
#
# torch's own CMake package is not used: for a CUDA build of torch it stops with a fatal error if
# the CUDA toolkit is missing, which neither a CPU build nor a program that only links ampfuse
# needs.
#
# torch is searched for in AMPFUSE_TORCH_ROOT, CMAKE_PREFIX_PATH and Torch_DIR (as for
# find_package(Torch)), beside an ampfuse installed in Python's packages, in AMPFUSE_TORCH_HINT, and
# last by importing it in Python. Sets AMPFUSE_TORCH_ROOT, AMPFUSE_TORCH_VERSION, AMPFUSE_TORCH_MINOR
# (2.11 of 2.11.0), AMPFUSE_TORCH_CUDA (empty for a CPU build of torch) and
# AMPFUSE_TORCH_INCLUDE_DIRS. If torch is not found, sets AMPFUSE_TORCH_PROBLEM instead.

set(AMPFUSE_TORCH_PROBLEM "")

if(NOT AMPFUSE_TORCH_ROOT)
  find_path(Torch_DIR TorchConfig.cmake PATH_SUFFIXES Torch share/cmake/Torch
            HINTS "${CMAKE_CURRENT_LIST_DIR}/../../../../torch" "${AMPFUSE_TORCH_HINT}" NO_CACHE)
  if(Torch_DIR)
    cmake_path(SET _ampfuse_root NORMALIZE "${Torch_DIR}/../../..")
  else()
    find_package(Python COMPONENTS Interpreter QUIET)
    if(Python_FOUND)
      execute_process(
        COMMAND ${Python_EXECUTABLE} -c
                "import torch, os; print(os.path.dirname(torch.__file__))"
        OUTPUT_VARIABLE _ampfuse_root OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
    endif()
  endif()
  if(_ampfuse_root)  # a failure is not cached: the next configuration searches again
    set(AMPFUSE_TORCH_ROOT "${_ampfuse_root}" CACHE PATH "Folder of torch: include/ and lib/ are in it" FORCE)
  endif()
endif()
if(NOT EXISTS "${AMPFUSE_TORCH_ROOT}/include/torch/csrc/api/include/torch/version.h")
  set(AMPFUSE_TORCH_PROBLEM
      "ampfuse needs torch: install it (pip install torch), or point CMAKE_PREFIX_PATH at a LibTorch")
  return()
endif()

# Python's torch has its version in version.py, a LibTorch archive in build-version
# ("2.11.0+cu130").
if(EXISTS "${AMPFUSE_TORCH_ROOT}/version.py")
  file(READ "${AMPFUSE_TORCH_ROOT}/version.py" _ampfuse_text)
  string(REGEX MATCH "__version__ = '([0-9]+(\\.[0-9]+)*)" _ "${_ampfuse_text}")
  set(AMPFUSE_TORCH_VERSION "${CMAKE_MATCH_1}")
  string(REGEX MATCH "cuda[^=\n]*= '([0-9.]+)'" _ "${_ampfuse_text}")
  set(AMPFUSE_TORCH_CUDA "${CMAKE_MATCH_1}")
else()
  file(READ "${AMPFUSE_TORCH_ROOT}/build-version" _ampfuse_text)
  string(REGEX MATCH "^([0-9.]+)" _ "${_ampfuse_text}")
  set(AMPFUSE_TORCH_VERSION "${CMAKE_MATCH_1}")
  string(REGEX MATCH "cu([0-9]+)([0-9])" _ "${_ampfuse_text}")
  if(CMAKE_MATCH_1)
    set(AMPFUSE_TORCH_CUDA "${CMAKE_MATCH_1}.${CMAKE_MATCH_2}")
  else()
    set(AMPFUSE_TORCH_CUDA "")
  endif()
endif()

string(REGEX MATCH "^[0-9]+\\.[0-9]+" AMPFUSE_TORCH_MINOR "${AMPFUSE_TORCH_VERSION}")

set(AMPFUSE_TORCH_INCLUDE_DIRS "${AMPFUSE_TORCH_ROOT}/include"
                               "${AMPFUSE_TORCH_ROOT}/include/torch/csrc/api/include")

if(NOT TARGET ampfuse::torch)
  add_library(ampfuse::torch INTERFACE IMPORTED)
  set(_ampfuse_libraries c10 torch_cpu torch)
  if(AMPFUSE_TORCH_CUDA)
    list(APPEND _ampfuse_libraries c10_cuda torch_cuda)
  endif()
  foreach(_ampfuse_name IN LISTS _ampfuse_libraries)
    add_library(ampfuse::lib_${_ampfuse_name} SHARED IMPORTED)
    set_target_properties(
      ampfuse::lib_${_ampfuse_name}
      PROPERTIES IMPORTED_LOCATION
                 "${AMPFUSE_TORCH_ROOT}/lib/${CMAKE_SHARED_LIBRARY_PREFIX}${_ampfuse_name}${CMAKE_SHARED_LIBRARY_SUFFIX}")
    target_link_libraries(ampfuse::torch INTERFACE ampfuse::lib_${_ampfuse_name})
  endforeach()
  target_include_directories(ampfuse::torch SYSTEM INTERFACE ${AMPFUSE_TORCH_INCLUDE_DIRS})
endif()
