// The tensors of a step as kernels see them.
#pragma once

#include <vector>

#include "fused_step.h"
#include "step_tensor.h"

namespace ampfuse {

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
