// Device functions that need no scheduler.
#pragma once

#include <algorithm>
#include <concepts>
#include <type_traits>

#include "simt/runtime.h"

[[noreturn]] inline void __trap(simt::runtime::Site where = simt::runtime::Site::current()) {
  simt::runtime::fault("__trap", where);
}

// A store with a cache hint, which has no effect here.
template <class T>
void __stcs(T* address, std::type_identity_t<T> value) {
  *address = value;
}
// min and max of device code, for two integers of one size.
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
