// Converts the arguments of a call to the arguments of its kernels.
#pragma once

#include <ATen/ops/empty.h>

#include <limits>

#include "../ops/cross_entropy.h"
#include "../tensors/variant.h"
#include "cross_entropy_teams.cuh"
#include "stream.h"

namespace ampfuse {

/// Kernels index classes with int, and their loop counters run a few packs per thread past the end.
inline constexpr int64_t kMostClasses = std::numeric_limits<int>::max() - (1 << 17);

inline IndexType index_type(const at::Tensor& target) {
  switch (target.scalar_type()) {
    case at::kInt:
      return IndexType::kInt;
    case at::kByte:
      return IndexType::kByte;
    default:
      return IndexType::kLong;
  }
}

/// Calls run.operator()<grad_t>() with the type of the gradient, even if none is asked for: the
/// type of the logits, or a 16-bit type for float logits. Kernels for image positions (Team::kSize
/// of 1) and for QuickFloat exist only for the type of the logits; no caller needs another.
template <typename scalar_t, typename Team, typename Run>
void dispatch_gradient(at::ScalarType dtype, const Run& run) {
  if constexpr (std::is_same_v<scalar_t, float> && Team::kSize > 1) {
    if (dtype == at::kHalf) return run.template operator()<c10::Half>();
    if (dtype == at::kBFloat16) return run.template operator()<c10::BFloat16>();
  }
  if constexpr (std::is_same_v<scalar_t, QuickFloat>) {
    run.template operator()<float>();
  } else {
    run.template operator()<scalar_t>();
  }
}

inline RowsAt rows_at(const at::Tensor& rows) {
  if (rows.dim() == 3) return {rows.stride(0), rows.size(2), rows.stride(1)};
  return {rows.stride(0), 1, 1};
}

/// Returns the kernels' view of the arguments. Probabilities are converted to the dtype of the
/// loss; `converted` owns them and must live until the launch.
template <typename scalar_t>
CrossEntropyTable<scalar_t> table_of(const CrossEntropyArguments& arguments,
                                     at::Tensor& converted) {
  using acc_t = RowAcc<scalar_t>;
  const at::Tensor& input = arguments.input;
  TORCH_CHECK_VALUE(input.size(1) <= kMostClasses, "cross_entropy: input: expected at most ",
                    kMostClasses, " classes, got ", input.size(1));
  CrossEntropyTable<scalar_t> table = {};
  table.input = static_cast<const scalar_t*>(input.const_data_ptr());
  table.input_at = rows_at(input);
  table.rows = arguments.rows().expect_int();
  table.classes = static_cast<int>(input.size(1));
  table.is_shard = arguments.all_classes.has_value();
  if (arguments.has_probabilities()) {
    // Other formats keep strides: those of overlapping rows need not be those of a matrix.
    converted = arguments.target.to(loss_dtype(input), /*non_blocking=*/false, /*copy=*/false,
                                    at::MemoryFormat::Contiguous);
    table.probabilities = converted.const_data_ptr<acc_t>();
    table.probabilities_at = rows_at(converted);
  } else {
    table.target = arguments.target.const_data_ptr();
    table.index_type = index_type(arguments.target);
  }
  table.ignore_index = arguments.options.ignore_index;
  if (arguments.weight) table.weight = arguments.weight->const_data_ptr<acc_t>();
  table.terms = arguments.terms<acc_t, RowNumber<scalar_t>>();
  return table;
}

/// Memory on the device through which blocks and kernels of a call pass numbers to others.
class CrossEntropyWorkspace {
 public:
  /// `weight_blocks`: number of blocks that sum target weights, or 0.
  CrossEntropyWorkspace(int weight_blocks, const at::TensorOptions& doubles)
      : weight_blocks_(weight_blocks), memory_(at::empty({1 + weight_blocks * kWeight}, doubles)) {}

  const at::Tensor& memory() const { return memory_; }
  int weight_blocks() const { return weight_blocks_; }
  unsigned* finished() const { return static_cast<unsigned*>(memory_.mutable_data_ptr()); }
  TargetWeight* weights() const {
    if (weight_blocks_ == 0) return nullptr;
    return reinterpret_cast<TargetWeight*>(memory_.mutable_data_ptr<double>() + 1);
  }

 private:
  static constexpr int64_t kWeight = sizeof(TargetWeight) / sizeof(double);
  int weight_blocks_;
  at::Tensor memory_;
};

inline bool is_plain(const CrossEntropyArguments& arguments) {
  const LossOptions& options = arguments.options;
  return !arguments.has_probabilities() && options.label_smoothing == 0 && !options.softcap;
}

inline DeviceRoom device_room(const LaunchStream& stream) {
  return {.multiprocessors = stream.multiprocessors(),
          .shared = stream.attribute(cudaDevAttrMaxSharedMemoryPerMultiprocessor),
          .shared_per_block = stream.attribute(cudaDevAttrMaxSharedMemoryPerBlockOptin),
          .l2 = stream.attribute(cudaDevAttrL2CacheSize),
          .prefers_whole = has_variant("whole_rows"),
          .holds_twice = has_variant("held_twice")};
}

/// The functions `backward` and `rescale` of CrossEntropyKernels.
void cross_entropy_backward_cuda(const CrossEntropyArguments& arguments,
                                 const at::Tensor& grad_output, const at::Tensor& statistics,
                                 const at::Tensor& divisor, const at::Tensor& grad);
void cross_entropy_rescale_cuda(const at::Tensor& grad, const at::Tensor& baked_scale,
                                const at::Tensor& grad_output);

}  // namespace ampfuse
