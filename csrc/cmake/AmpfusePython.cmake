# Builds the pybind11 module ampfuse._C, and writes build_info.json, which ampfuse/_library.py reads
# before it loads any library.

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
target_link_libraries(_C PRIVATE ampfuse pybind11::headers ${AMPFUSE_TORCH_PYTHON})
set_target_properties(_C PROPERTIES CXX_VISIBILITY_PRESET hidden INSTALL_RPATH "$ORIGIN/lib")
ampfuse_own_sources(_C)
install(TARGETS _C LIBRARY DESTINATION .)

# Python compares this version with torch's before it loads the library: with another torch, loading
# fails with an undefined symbol.
file(CONFIGURE OUTPUT build_info.json CONTENT [[{"torch_version": "@AMPFUSE_TORCH_VERSION@"}
]] @ONLY)
install(FILES ${PROJECT_BINARY_DIR}/build_info.json DESTINATION .)
