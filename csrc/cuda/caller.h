// The caller of the functions of libampfuse_cuda.
//
// That library has the CUDA kernels and what launches them: the .cu and .cuh files of this folder.
// It has a CUDA runtime of its own and uses nothing of torch except header-only types, so one file
// serves every release of torch. The .cpp files of this folder are the callers: they are part of
// libampfuse, which is compiled for each release, and call no function of CUDA. The files named
// *_interface.h declare what the callers call.
#pragma once

#include <cstddef>

/// Exports a function of libampfuse_cuda.
#define AMPFUSE_CUDA_API __attribute__((visibility("default")))

namespace ampfuse {

/// The device and the stream of a call, its memory, and how its errors are thrown.
class CudaCaller {
 public:
  CudaCaller(int device, void* stream) : device(device), stream(stream) {}
  CudaCaller(const CudaCaller&) = delete;
  CudaCaller& operator=(const CudaCaller&) = delete;

  /// Returns memory of the device, aligned for any type, that nothing else on the stream uses
  /// before the call's launches are finished.
  virtual void* allocate(size_t bytes) = 0;

  /// Throws an error of CUDA. `error` is a cudaError_t.
  [[noreturn]] virtual void fail(int error, const char* text) = 0;

  const int device;
  void* const stream;  // a cudaStream_t

 protected:
  ~CudaCaller() = default;
};

/// The version of CUDA that compiled the kernels, and their architectures, separated by spaces.
AMPFUSE_CUDA_API const char* kernels_cuda_version();
AMPFUSE_CUDA_API const char* kernels_architectures();

/// True if a CUDA graph is being captured on a cudaStream_t.
AMPFUSE_CUDA_API bool is_stream_capturing(void* stream);

}  // namespace ampfuse
