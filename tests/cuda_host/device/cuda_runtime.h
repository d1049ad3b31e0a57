// The functions of CUDA's runtime that launches call, for a small device whose memory is the
// host's.
#pragma once

#include "simt/simt.h"

#include <cstddef>
#include <cstdlib>
#include <cstring>
#include <utility>

using cudaError_t = int;
using cudaStream_t = void*;
inline constexpr cudaError_t cudaSuccess = 0;

namespace simt {
// The next call returns it, once.
inline cudaError_t next_error = cudaSuccess;
inline cudaError_t taken_error() {
  return std::exchange(next_error, cudaSuccess);
}
}  // namespace simt

inline cudaError_t cudaGetLastError() {
  return simt::taken_error();
}
inline const char* cudaGetErrorString(cudaError_t) {
  return "an error of the device";
}
inline cudaError_t cudaGetDevice(int* device) {
  *device = 0;
  return simt::taken_error();
}
inline cudaError_t cudaSetDevice(int) {
  return simt::taken_error();
}

enum cudaDeviceAttr {
  cudaDevAttrMultiProcessorCount,
  cudaDevAttrMaxSharedMemoryPerMultiprocessor,
  cudaDevAttrMaxSharedMemoryPerBlockOptin,
  cudaDevAttrL2CacheSize
};
inline cudaError_t cudaDeviceGetAttribute(int* value, cudaDeviceAttr name, int) {
  *value = name == cudaDevAttrMultiProcessorCount ? 1
           : name == cudaDevAttrL2CacheSize       ? 1 << 20
                                                  : 96 << 10;
  return cudaSuccess;
}

enum cudaFuncAttribute { cudaFuncAttributeMaxDynamicSharedMemorySize };
template <typename Kernel>
cudaError_t cudaFuncSetAttribute(Kernel*, cudaFuncAttribute, int) {
  return cudaSuccess;
}

inline cudaError_t cudaMemsetAsync(void* memory, int value, size_t bytes, cudaStream_t) {
  std::memset(memory, value, bytes);
  return cudaSuccess;
}

inline constexpr unsigned cudaHostAllocPortable = 1;
inline cudaError_t cudaHostAlloc(void** memory, size_t bytes, unsigned) {
  *memory = std::malloc(bytes);
  return cudaSuccess;
}

enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone };
enum cudaStreamCaptureMode { cudaStreamCaptureModeRelaxed };
inline cudaError_t cudaStreamIsCapturing(cudaStream_t, cudaStreamCaptureStatus*) {
  return cudaSuccess;
}
inline cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode*) {
  return cudaSuccess;
}
