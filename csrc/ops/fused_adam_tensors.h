// The tensors of a step as kernels see them.
#pragma once

#include <array>
#include <vector>

#include "fused_adam.h"

namespace ampfuse {

/// The dtypes that a kernel is compiled for. `master` is Undefined if there are no masters.
struct AdamDtypes {
  at::ScalarType param;
  at::ScalarType grad;
  at::ScalarType state;
  at::ScalarType master;

  bool operator==(const AdamDtypes&) const = default;
};

/// The tensors at one index of the lists, as kernels see them: their elements are in one order.
struct AdamTensor {
  std::array<void*, math::kAdamColumns> data;  // null if the column is absent
  int64_t size;
  AdamDtypes dtypes;
  float* step;
};

/// The tensors at all indices of the lists, checked. Tensors with gaps, misaligned ones, and those
/// whose elements are in another order than the parameter's are replaced by dense copies.
class AdamTensors {
 public:
  explicit AdamTensors(const FusedAdamArguments& arguments);

  const std::vector<AdamTensor>& get() const { return tensors_; }

  /// Copies what the step wrote into dense copies back to the original tensors.
  void write_back() const;

 private:
  void complete(const FusedAdamArguments& arguments, size_t t);
  void* data(const FusedAdamArguments& arguments, int column, size_t t);

  struct DenseCopy {
    at::Tensor original;
    at::Tensor copy;
    bool is_written;
  };

  std::vector<AdamTensor> tensors_;
  std::vector<DenseCopy> dense_copies_;
};

}  // namespace ampfuse
