# Defines ampfuse_add_cuda_library(sources…), which makes the target ampfuse_cuda: the library of CUDA
# kernels. It names nothing of torch and has a CUDA runtime of its own, so it serves every release of
# torch. If AMPFUSE_CUDA_LIBRARY is set, the target is that library.

function(ampfuse_add_cuda_library)
  if(AMPFUSE_CUDA_LIBRARY)
    add_library(ampfuse_cuda SHARED IMPORTED)
    set_property(TARGET ampfuse_cuda PROPERTY IMPORTED_LOCATION "${AMPFUSE_CUDA_LIBRARY}")
    install(FILES "${AMPFUSE_CUDA_LIBRARY}" DESTINATION lib)
    return()
  endif()

  add_library(ampfuse_cuda SHARED ${ARGN})
  target_include_directories(ampfuse_cuda SYSTEM PRIVATE ${AMPFUSE_TORCH_INCLUDE_DIRS})
  list(JOIN CMAKE_CUDA_ARCHITECTURES " " archs)
  set_property(
    SOURCE csrc/cuda/runtime.cu
    PROPERTY COMPILE_DEFINITIONS "AMPFUSE_CUDA_VERSION=\"${AMPFUSE_CUDA_VERSION}\""
             "AMPFUSE_CUDA_ARCHS=\"${archs}\"")
  set_property(SOURCE csrc/cuda/runtime.cu PROPERTY SKIP_UNITY_BUILD_INCLUSION ON)
  if(AMPFUSE_CUDA_VERSION VERSION_GREATER_EQUAL 13.0)
    # A wheel is downloaded more often than its kernels are loaded, so its size matters most. Other
    # builds compile kernels with the same flag, so that ccache serves both. CUDA 12.8 has the flag,
    # too, but its kernels may meet drivers before 550, which cannot load compressed ones.
    target_compile_options(ampfuse_cuda PRIVATE $<$<COMPILE_LANGUAGE:CUDA>:--compress-mode=size>)
  endif()
  # The library's own CUDA runtime must not replace another one in the same process.
  target_link_options(ampfuse_cuda PRIVATE -Wl,--exclude-libs,ALL)
  target_link_libraries(ampfuse_cuda PRIVATE ${AMPFUSE_CUDART} ${CMAKE_DL_LIBS} rt)
  set_target_properties(
    ampfuse_cuda
    PROPERTIES CXX_VISIBILITY_PRESET hidden
               CUDA_VISIBILITY_PRESET hidden
               VISIBILITY_INLINES_HIDDEN ON
               SOVERSION ${PROJECT_VERSION_MAJOR}.${PROJECT_VERSION_MINOR})
  ampfuse_own_sources(ampfuse_cuda)
  install(TARGETS ampfuse_cuda LIBRARY DESTINATION lib NAMELINK_SKIP)
endfunction()
