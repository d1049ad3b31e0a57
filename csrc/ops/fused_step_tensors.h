// The tensors of a step as kernels see them.
#pragma once

#include <array>
#include <vector>

#include "fused_step.h"

namespace ampfuse {

/// The dtypes that a kernel is compiled for. Undefined: no such tensors.
struct StepDtypes {
  at::ScalarType param;
  at::ScalarType grad;
  at::ScalarType state;  // of all moments; int8 if they are in 8 bits
  at::ScalarType master;
  at::ScalarType ema;

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

/// The tensors at all indices of the lists, checked. Tensors with gaps, misaligned ones, and those
/// whose elements are in another order than the parameter's are replaced by dense copies.
class StepTensors {
 public:
  explicit StepTensors(const FusedStepArguments& arguments);

  const std::vector<StepTensor>& get() const { return tensors_; }

  /// Copies what the step wrote into dense copies back to the original tensors.
  void write_back() const;

 private:
  void complete(const FusedStepArguments& arguments, size_t t);
  void* data(const FusedStepArguments& arguments, int column, size_t t);

  struct DenseCopy {
    at::Tensor original;
    at::Tensor copy;
    bool is_written;
  };

  std::vector<StepTensor> tensors_;
  std::vector<DenseCopy> dense_copies_;
};

}  // namespace ampfuse
