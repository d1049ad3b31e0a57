# Installs the files for find_package(ampfuse): lib/, include/ampfuse/ and share/cmake/ampfuse/.
#
# A library belongs to one minor release of torch. Each has a folder, so that builds for several
# releases can be installed beside each other.

include(CMakePackageConfigHelpers)

set(_ampfuse_cmake_dir share/cmake/ampfuse)
install(TARGETS ampfuse EXPORT ampfuseTargets LIBRARY DESTINATION ${AMPFUSE_LIBRARY_DIR} NAMELINK_SKIP)
install(DIRECTORY csrc/include/ampfuse DESTINATION include FILES_MATCHING PATTERN "*.h")
install(FILES ${PROJECT_BINARY_DIR}/include/ampfuse/version.h DESTINATION include/ampfuse)
install(FILES LICENSE DESTINATION share/licenses/ampfuse)
install(EXPORT ampfuseTargets NAMESPACE ampfuse::
        DESTINATION ${_ampfuse_cmake_dir}/torch${AMPFUSE_TORCH_MINOR})

# A wheel finds torch beside itself. Other builds store the path of the torch they were built for.
set(AMPFUSE_TORCH_HINT "")
if(NOT AMPFUSE_BESIDE_TORCH)
  set(AMPFUSE_TORCH_HINT "${AMPFUSE_TORCH_ROOT}")
endif()
configure_package_config_file(csrc/cmake/ampfuseConfig.cmake.in ampfuseConfig.cmake
                              INSTALL_DESTINATION ${_ampfuse_cmake_dir})
write_basic_package_version_file(ampfuseConfigVersion.cmake COMPATIBILITY SameMinorVersion)
install(FILES ${PROJECT_BINARY_DIR}/ampfuseConfig.cmake
              ${PROJECT_BINARY_DIR}/ampfuseConfigVersion.cmake csrc/cmake/AmpfuseTorch.cmake
        DESTINATION ${_ampfuse_cmake_dir})
