// Packs of numbers: conversion to and from the type in which they are stored, and their maximum.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include "../math/lane.h"
#include "cross_entropy_exponential.cuh"
#include "vectorized.cuh"

namespace ampfuse {

#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
// Rounds two floats in one instruction; the compiler would use two, and a third to join the halves.
__device__ __forceinline__ uint32_t rounded_pair(float first, float second, c10::BFloat16) {
  uint32_t pair;
  asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
__device__ __forceinline__ uint32_t rounded_pair(float first, float second, c10::Half) {
  uint32_t pair;
  asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(pair) : "f"(second), "f"(first));
  return pair;
}
#endif

template <typename acc_t, typename T, int kCount>
__device__ __forceinline__ void widen(const Pack<T, kCount>& pack, acc_t (&x)[kCount]) {
#pragma unroll
  for (int e = 0; e < kCount; ++e) x[e] = static_cast<acc_t>(pack.value[e]);
}

// A pack of 16-bit numbers as registers, which hold two numbers each.
template <int kCount>
struct Pairs {
  uint32_t pair[kCount / 2];
};

// A bfloat16 is the upper half of a float. This takes one instruction per element; the compiler
// would use two for every second one.
template <int kCount>
  requires(kCount % 2 == 0)
__device__ __forceinline__ void widen(const Pack<c10::BFloat16, kCount>& pack, float (&x)[kCount]) {
  const auto pairs = __builtin_bit_cast(Pairs<kCount>, pack);
#pragma unroll
  for (int i = 0; i < kCount / 2; ++i) {
    x[2 * i] = __builtin_bit_cast(float, pairs.pair[i] << 16);
    x[2 * i + 1] = __builtin_bit_cast(float, pairs.pair[i] & 0xffff0000u);
  }
}

// The largest of many numbers, or NaN if any is NaN.
template <typename T>
class PackMaximum {
 public:
  using acc_t = RowAcc<T>;

  template <int kCount>
  __device__ __forceinline__ void add(const Pack<T, kCount>& pack) {
#pragma unroll
    for (const T x : pack.value) largest_ = math::Lane<acc_t>::larger(largest_, x);
  }

  // Returns −∞ if nothing was added.
  __device__ acc_t get() const { return largest_; }

 private:
  acc_t largest_ = -HUGE_VALF;
};

// The version for 16-bit numbers: add() takes one instruction per two numbers, and get() combines
// the two halves of the register.
template <typename T>
  requires(sizeof(T) == 2)
class PackMaximum<T> {
 public:
  template <int kCount>
  __device__ __forceinline__ void add(const Pack<T, kCount>& pack) {
    if constexpr (kCount == 1) {
      add_pair(__builtin_bit_cast(uint32_t, Pack<T, 2>{{pack.value[0], pack.value[0]}}));
    } else {
      const auto pairs = __builtin_bit_cast(Pairs<kCount>, pack);
#pragma unroll
      for (int i = 0; i < kCount / 2; ++i) add_pair(pairs.pair[i]);
    }
  }

  __device__ float get() const {
    const auto halves = __builtin_bit_cast(Pack<T, 2>, largest_);
    return math::Lane<float>::larger(static_cast<float>(halves.value[0]),
                                     static_cast<float>(halves.value[1]));
  }

 private:
  __device__ __forceinline__ void add_pair(uint32_t pair) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
    if constexpr (std::is_same_v<T, c10::Half>) {
      asm("max.NaN.f16x2 %0, %0, %1;" : "+r"(largest_) : "r"(pair));
    } else {
      asm("max.NaN.bf16x2 %0, %0, %1;" : "+r"(largest_) : "r"(pair));
    }
#else
    const auto so_far = __builtin_bit_cast(Pack<T, 2>, largest_);
    auto halves = __builtin_bit_cast(Pack<T, 2>, pair);
    for (int i = 0; i < 2; ++i) {
      const auto x = static_cast<float>(so_far.value[i]);
      if (x >= static_cast<float>(halves.value[i]) || x != x) halves.value[i] = so_far.value[i];
    }
    largest_ = __builtin_bit_cast(uint32_t, halves);
#endif
  }

  uint32_t largest_ = std::is_same_v<T, c10::Half> ? 0xfc00fc00u : 0xff80ff80u;  // −∞ twice
};

template <typename T, typename acc_t, int kCount>
__device__ __forceinline__ Pack<T, kCount> rounded(const acc_t (&x)[kCount]) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 800
  constexpr bool kInPairs = sizeof(T) == 2 && std::is_same_v<acc_t, float> && kCount % 2 == 0;
#else
  constexpr bool kInPairs = false;
#endif
  if constexpr (kInPairs) {
    Pairs<kCount> words;
#pragma unroll
    for (int i = 0; i < kCount / 2; ++i) words.pair[i] = rounded_pair(x[2 * i], x[2 * i + 1], T());
    return __builtin_bit_cast(Pack<T, kCount>, words);
  } else {
    Pack<T, kCount> pack;
#pragma unroll
    for (int e = 0; e < kCount; ++e) pack.value[e] = static_cast<T>(x[e]);
    return pack;
  }
}

}  // namespace ampfuse
