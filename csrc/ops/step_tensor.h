// A tensor of a fused step as kernels see it.
#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <array>
#include <cstdint>

#include "../math/fused_step.h"

namespace ampfuse {

/// The dtype of columns that are absent. Undefined would not do: its number differs between
/// releases of torch, and libampfuse_cuda serves all of them.
inline constexpr c10::ScalarType kNoDtype = c10::ScalarType::Bool;

/// The dtypes that a kernel is compiled for, or kNoDtype.
struct StepDtypes {
  c10::ScalarType param;
  c10::ScalarType grad;
  c10::ScalarType state;  // of all moments; int8 if they are in 8 bits
  c10::ScalarType master;
  c10::ScalarType ema;

  bool operator==(const StepDtypes&) const = default;
};

/// The tensors at one index of the lists, as kernels see them: their elements are in one order.
struct StepTensor {
  std::array<void*, math::kMostColumns> data;  // null if the column is absent
  int64_t size;
  StepDtypes dtypes;
  float* step;          // null if steps are not counted
  int64_t first_index;  // the first element's index among all elements of the model
};

}  // namespace ampfuse
