// Atomics and fences.
//
// An atomic orders nothing by itself, as in CUDA: a thread must fence before its atomics publish
// what it wrote. Both sides are more lenient than CUDA. After a thread's first fence, each of its
// atomics publishes everything that the thread did before, so a missing later fence is not
// detected. Any atomic acquires, so the "last block finishes" pattern passes without a second
// fence.
#pragma once

#include <atomic>
#include <concepts>
#include <type_traits>

#include "simt/runtime.h"

namespace simt {

// Sets *address = update(*address) and returns the old value.
template <class T, class Update>
T atomic_update(T* address, Update update) {
  runtime::before_atomic(address);
  std::atomic_ref<T> cell(*address);
  T old = cell.load(std::memory_order_relaxed);
  while (!cell.compare_exchange_weak(old, update(old), std::memory_order_relaxed)) {
  }
  runtime::after_atomic(address);
  return old;
}

}  // namespace simt

// The pointer determines the type, and the operand is converted to it, as in CUDA.

template <std::integral T>
  requires(sizeof(T) == 4)
T atomicAdd(T* address, std::type_identity_t<T> value) {
  return simt::atomic_update(address, [=](T old) { return old + value; });
}

inline float atomicExch(float* address, float value) {
  return simt::atomic_update(address, [=](float) { return value; });
}

inline void __threadfence() {
  simt::runtime::fence();
}
inline void __threadfence_system() {
  simt::runtime::fence();
}
