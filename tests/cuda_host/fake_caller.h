// A caller of launches without torch.
#pragma once

#include "cuda/caller.h"

#include <stdexcept>
#include <string>
#include <vector>

#include "numbers.h"

class FakeCaller final : public ampfuse::CudaCaller {
 public:
  FakeCaller() : CudaCaller(0, nullptr) {}

  // The memory is full of NaNs, and ends where the allocation ends.
  void* allocate(size_t bytes) override {
    return memory_.emplace_back(Type::kByte, static_cast<int64_t>(bytes)).data();
  }
  void fail(int error, const char* text) override {
    throw std::runtime_error(std::to_string(error) + ": " + text);
  }

 private:
  std::vector<Numbers> memory_;
};

inline c10::ScalarType dtype_of(Type type) {
  switch (type) {
    case Type::kHalf:
      return c10::ScalarType::Half;
    case Type::kFloat:
      return c10::ScalarType::Float;
    case Type::kDouble:
      return c10::ScalarType::Double;
    case Type::kRemainder:
      return c10::ScalarType::Short;
    case Type::kCode:
      return c10::ScalarType::Char;
    case Type::kByte:
      return c10::ScalarType::Byte;
    default:
      return c10::ScalarType::BFloat16;
  }
}
