#include <cuda_runtime.h>

#include <new>

#include "cross_entropy_interface.h"
#include "stream.cuh"

namespace ampfuse {

const char* kernels_cuda_version() {
  return AMPFUSE_CUDA_VERSION;
}

const char* kernels_architectures() {
  return AMPFUSE_CUDA_ARCHS;
}

bool is_stream_capturing(void* stream) {
  cudaStreamCaptureStatus status = cudaStreamCaptureStatusNone;
  if (cudaStreamIsCapturing(static_cast<cudaStream_t>(stream), &status) != cudaSuccess) {
    cudaGetLastError();  // or the next launch would report the error
    return false;
  }
  return status != cudaStreamCaptureStatusNone;
}

BadTarget* allocate_bad_target(CudaCaller& caller) {
  set_device(caller);
  // The first call may run while a CUDA graph is being captured; the allocation is not part of the
  // graph.
  cudaStreamCaptureMode mode = cudaStreamCaptureModeRelaxed;
  check_cuda(caller, cudaThreadExchangeStreamCaptureMode(&mode));
  void* memory = nullptr;
  const cudaError_t error = cudaHostAlloc(&memory, sizeof(BadTarget), cudaHostAllocPortable);
  check_cuda(caller, cudaThreadExchangeStreamCaptureMode(&mode));
  check_cuda(caller, error);
  return new (memory) BadTarget{};
}

}  // namespace ampfuse
