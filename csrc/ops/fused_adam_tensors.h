// A step's tensors as kernels see them.
#pragma once

#include <array>
#include <vector>

#include "fused_adam.h"

namespace ampfuse {

/// What a kernel is compiled for. Undefined: there is no master.
struct AdamDtypes {
  at::ScalarType param;
  at::ScalarType grad;
  at::ScalarType state;
  at::ScalarType master;

  bool operator==(const AdamDtypes&) const = default;
};

/// One of a step's tensors as kernels see it: the elements of all columns in the same order.
struct AdamTensor {
  std::array<void*, math::kAdamColumns> data;  // null: no such column
  int64_t size;
  AdamDtypes dtypes;
  float* step;
};

/// All of them, checked. Where a tensor's columns differ in their strides, leave gaps, or lie
/// askew, dense copies stand in for some.
class AdamTensors {
 public:
  explicit AdamTensors(const FusedAdamArguments& arguments);

  const std::vector<AdamTensor>& get() const { return tensors_; }

  /// Copies what the step wrote into stand-ins back to where they came from.
  void write_back() const;

 private:
  void complete(const FusedAdamArguments& arguments, size_t t);
  void* data(const FusedAdamArguments& arguments, int column, size_t t);

  struct StandIn {
    at::Tensor original;
    at::Tensor copy;
    bool is_written;
  };

  std::vector<AdamTensor> tensors_;
  std::vector<StandIn> stand_ins_;
};

}  // namespace ampfuse
