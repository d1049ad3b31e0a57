// Numbers in host memory, whose type is chosen at run time. So code of tests is compiled once, and
// only kernels once per type.
#pragma once

#include <torch/headeronly/util/BFloat16.h>
#include <torch/headeronly/util/Half.h>

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <cstring>
#include <memory>
#include <random>
#include <string_view>
#include <tuple>
#include <type_traits>
#include <vector>

// kUpperHalf is the bfloat16 of a parameter with a remainder, as bits; kRemainder its remainder.
// kCode and kByte are the codes of a first and a second moment in 8 bits.
enum class Type { kHalf, kBFloat16, kFloat, kDouble, kUpperHalf, kRemainder, kCode, kByte };
inline constexpr Type kHalf = Type::kHalf;
inline constexpr Type kBFloat16 = Type::kBFloat16;
inline constexpr Type kFloat = Type::kFloat;
inline constexpr Type kDouble = Type::kDouble;

template <Type kType>
using CppType = std::tuple_element_t<
    static_cast<size_t>(kType),
    std::tuple<c10::Half, c10::BFloat16, float, double, uint16_t, int16_t, int8_t, uint8_t>>;

// Calls visit.operator()<T>() with the type in C++.
template <typename Visit>
auto with_type(Type type, const Visit& visit) {
  switch (type) {
    case kHalf:
      return visit.template operator()<c10::Half>();
    case kBFloat16:
      return visit.template operator()<c10::BFloat16>();
    case kFloat:
      return visit.template operator()<float>();
    case kDouble:
      return visit.template operator()<double>();
    case Type::kUpperHalf:
      return visit.template operator()<uint16_t>();
    case Type::kCode:
      return visit.template operator()<int8_t>();
    case Type::kByte:
      return visit.template operator()<uint8_t>();
    default:
      return visit.template operator()<int16_t>();
  }
}

template <typename T>
constexpr Type kTypeOf = std::is_same_v<T, c10::Half>       ? kHalf
                         : std::is_same_v<T, c10::BFloat16> ? kBFloat16
                         : std::is_same_v<T, float>         ? kFloat
                         : std::is_same_v<T, double>        ? kDouble
                         : std::is_same_v<T, uint16_t>      ? Type::kUpperHalf
                         : std::is_same_v<T, int8_t>        ? Type::kCode
                         : std::is_same_v<T, uint8_t>       ? Type::kByte
                                                            : Type::kRemainder;

inline int64_t size_of(Type type) {
  return with_type(type, []<typename T>() { return static_cast<int64_t>(sizeof(T)); });
}

// The type in which kernels compute with numbers of this type.
inline Type arithmetic_of(Type type) {
  return type == kDouble ? kDouble : kFloat;
}

// Converts a number to the element type of a kernel.
template <typename T>
T as_element(double x) {
  if constexpr (std::is_same_v<T, double>) return x;
  return static_cast<T>(static_cast<float>(x));
}

// The digits of a floating-point type, and the exponent of its smallest normal number.
struct Format {
  int digits;
  int lowest;
};
inline Format format_of(Type type) {
  if (type == kDouble) return {53, -1022};
  if (type == kFloat) return {24, -126};
  return type == kHalf ? Format{11, -14} : Format{8, -126};
}

// Returns the spacing of the numbers of a type around x.
inline long double last_place(Type type, long double x) {
  const auto [digits, lowest] = format_of(type);
  const int exponent = x == 0 ? lowest : std::max(lowest, std::ilogb(x));
  return std::ldexp(1.0L, exponent - digits + 1);
}

// An array that ends exactly where its allocation ends, so that ASan detects an access to one
// element too many. It starts `offset` elements after a 16-byte boundary. All bits are set at
// first: a NaN in every floating-point type.
class Numbers {
 public:
  Numbers(Type type, int64_t size, int64_t offset = 0)
      : type(type),
        size(size),
        offset(offset),
        memory_(new unsigned char[(offset + size) * size_of(type)]) {
    std::memset(memory_.get(), 0xff, (offset + size) * size_of(type));
  }

  double operator[](int64_t i) const {
    return with_type(type, [&]<typename T>() { return static_cast<double>(at<T>()[i]); });
  }
  void set(int64_t i, double x) const {
    with_type(type, [&]<typename T>() { at<T>()[i] = as_element<T>(x); });
  }
  void fill(const std::vector<double>& values) const {
    for (int64_t i = 0; i < size; ++i) set(i, values[i]);
  }
  void multiply(double factor) const {
    for (int64_t i = 0; i < size; ++i) set(i, (*this)[i] * factor);
  }

  void* data() const { return memory_.get() + offset * size_of(type); }
  template <typename T>
  T* at(int64_t i = 0) const {
    return static_cast<T*>(data()) + i;
  }
  // Returns the bytes of `count` numbers from number `first` on.
  std::string_view bits(int64_t first, int64_t count) const {
    const int64_t each = size_of(type);
    return {static_cast<const char*>(data()) + first * each, static_cast<size_t>(count * each)};
  }
  std::string_view bits() const { return bits(0, size); }

  Type type;
  int64_t size;
  int64_t offset;

 private:
  std::unique_ptr<unsigned char[]> memory_;
};

// Returns normally distributed numbers with a heavy tail: one in 64 is multiplied by 1000.
inline std::vector<double> random_values(int64_t size, uint32_t seed) {
  std::vector<double> values(size);
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  for (double& value : values) value = normal(generator) * (generator() % 64 == 0 ? 1000 : 1);
  return values;
}
