// Device functions that need no scheduler: bits, loads and stores, arithmetic.
//
// Approximate functions (__expf, rsqrtf, …) are exact to about the last bit here, but not on a GPU:
// a test of them needs a tolerance that fits the device.
#pragma once

#include <algorithm>
#include <bit>
#include <cmath>
#include <concepts>
#include <type_traits>

#include "simt/runtime.h"

[[noreturn]] inline void __trap(simt::runtime::Site where = simt::runtime::Site::current()) {
  simt::runtime::fault("__trap", where);
}

inline int __popc(unsigned x) {
  return std::popcount(x);
}
inline int __clz(int x) {
  return std::countl_zero(static_cast<unsigned>(x));
}
inline int __ffs(int x) {
  return x == 0 ? 0 : std::countr_zero(static_cast<unsigned>(x)) + 1;
}

inline unsigned __float_as_uint(float x) {
  return std::bit_cast<unsigned>(x);
}
inline float __uint_as_float(unsigned x) {
  return std::bit_cast<float>(x);
}
inline int __float_as_int(float x) {
  return std::bit_cast<int>(x);
}
inline float __int_as_float(int x) {
  return std::bit_cast<float>(x);
}
inline long long __double_as_longlong(double x) {
  return std::bit_cast<long long>(x);
}
inline double __longlong_as_double(long long x) {
  return std::bit_cast<double>(x);
}

// Loads and stores with cache hints, which have no effect here.
template <class T>
T __ldg(const T* address) {
  return *address;
}
template <class T>
T __ldcs(const T* address) {
  return *address;
}
template <class T>
T __ldcg(const T* address) {
  return *address;
}
template <class T>
void __stcs(T* address, std::type_identity_t<T> value) {
  *address = value;
}
template <class T>
void __stcg(T* address, std::type_identity_t<T> value) {
  *address = value;
}

// noexcept, because glibc's <math.h> declares these two names for its own use, with C linkage.
inline float __expf(float x) noexcept {
  return std::exp(x);
}
inline float __logf(float x) noexcept {
  return std::log(x);
}

// glibc declares C23's rsqrt since version 2.42.
#if !defined(__GLIBC_PREREQ) || !__GLIBC_PREREQ(2, 42)
inline float rsqrtf(float x) noexcept {
  return static_cast<float>(1 / std::sqrt(double{x}));
}
inline double rsqrt(double x) noexcept {
  return 1 / std::sqrt(x);
}
#endif

// Each function is one correctly rounded operation, never contracted: CMake passes
// -ffp-contract=off.
inline float __frcp_rn(float x) {
  return 1 / x;
}
inline float __fsqrt_rn(float x) {
  return std::sqrt(x);
}
inline float __fmul_rn(float x, float y) {
  return x * y;
}
inline float __fadd_rn(float x, float y) {
  return x + y;
}
inline float __double2float_rn(double x) {
  return static_cast<float>(x);
}
inline float __fdividef(float x, float y) {
  return x / y;
}

// The overloads of device code: for integers of one size, and for floating point, for which the
// result is the other operand if one is NaN.
template <std::integral T, std::integral U, class Result = decltype(T{} + U{})>
  requires(sizeof(T) == sizeof(U))
constexpr Result min(T a, U b) {
  return std::min<Result>(a, b);
}
template <std::integral T, std::integral U, class Result = decltype(T{} + U{})>
  requires(sizeof(T) == sizeof(U))
constexpr Result max(T a, U b) {
  return std::max<Result>(a, b);
}
template <std::floating_point T, std::floating_point U>
auto min(T a, U b) {
  return std::fmin(a, b);
}
template <std::floating_point T, std::floating_point U>
auto max(T a, U b) {
  return std::fmax(a, b);
}
