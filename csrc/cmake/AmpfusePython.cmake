# Builds the pybind11 module ampfuse._C, which lies beside the library.

find_package(Python REQUIRED COMPONENTS Interpreter OPTIONAL_COMPONENTS Development.Module)
if(NOT Python_Development.Module_FOUND)
  message(FATAL_ERROR "Python's C headers are missing for ${Python_EXECUTABLE}: install python3-dev "
                      "(Debian, Ubuntu) or python3-devel (Fedora).")
endif()
set(PYBIND11_FINDPYTHON ON)
execute_process(COMMAND ${Python_EXECUTABLE} -m pybind11 --cmakedir OUTPUT_VARIABLE pybind11_DIR
                OUTPUT_STRIP_TRAILING_WHITESPACE ERROR_QUIET)
find_package(pybind11 CONFIG REQUIRED)

find_library(AMPFUSE_TORCH_PYTHON torch_python NO_CACHE REQUIRED NO_DEFAULT_PATH
             PATHS ${AMPFUSE_TORCH_ROOT}/lib)
Python_add_library(_C MODULE WITH_SOABI csrc/python/bindings.cpp csrc/python/list_queries.cpp
  csrc/python/operator_call.cpp)
# It links none of torch's CUDA libraries, so that it also loads with a CPU build of torch.
add_dependencies(_C ampfuse)
target_link_libraries(
  _C PRIVATE $<COMPILE_ONLY:ampfuse> $<TARGET_LINKER_FILE:ampfuse> pybind11::headers
             ampfuse::lib_torch_cpu ampfuse::lib_c10 ${AMPFUSE_TORCH_PYTHON})
set_target_properties(_C PROPERTIES CXX_VISIBILITY_PRESET hidden INSTALL_RPATH "$ORIGIN")
ampfuse_own_sources(_C)
install(TARGETS _C LIBRARY DESTINATION ${AMPFUSE_LIBRARY_DIR})
