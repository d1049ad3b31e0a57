# Defines the target ampfuse::catch2 if Catch2 is found: major version 2 or 3, with a main().

find_package(Catch2 QUIET HINTS ${PROJECT_SOURCE_DIR}/.venv/cpp-headers/usr)
if(TARGET Catch2::Catch2WithMain)
  add_library(ampfuse_catch2 INTERFACE)
  target_link_libraries(ampfuse_catch2 INTERFACE Catch2::Catch2WithMain)
elseif(Catch2_FOUND)
  # Version 2 may have headers only: its main() is compiled once, in tests/cpp/main.cpp.
  add_library(ampfuse_catch2 STATIC ${PROJECT_SOURCE_DIR}/tests/cpp/main.cpp)
  target_link_libraries(ampfuse_catch2 PUBLIC Catch2::Catch2)
endif()
if(Catch2_FOUND)
  target_include_directories(ampfuse_catch2 INTERFACE ${PROJECT_SOURCE_DIR}/tests/cpp)
  add_library(ampfuse::catch2 ALIAS ampfuse_catch2)
else()
  message(WARNING "Catch2 was not found: no C++ tests are built. Debian, Ubuntu: apt install catch2")
  # This test always fails, so that a run without the C++ tests does not look like a pass.
  add_test(NAME catch2_is_installed COMMAND ${CMAKE_COMMAND} -E false)
endif()
