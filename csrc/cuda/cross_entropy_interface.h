#pragma once

#include <torch/headeronly/core/ScalarType.h>

#include <cstdint>
#include <limits>

#include "../math/cross_entropy.h"
#include "../math/cross_entropy_shards.h"
#include "caller.h"
#include "dtype_numbers.h"

namespace ampfuse {

/// Kernels index classes with int, and their loop counters run a few packs per thread past the end.
inline constexpr int64_t kMostClasses = std::numeric_limits<int>::max() - (1 << 17);

enum class IndexType { kLong, kInt, kByte };

/// The memory layout of a tensor's rows. For teams of several threads, each row is contiguous. For
/// a team of one thread, each position of a batch entry is a row, and positions are contiguous.
struct RowsAt {
  int64_t stride;        // from one row, or batch entry, to the next
  int64_t positions;     // positions per batch entry
  int64_t class_stride;  // from one class of a row to the next

  template <typename Team>
  AMPFUSE_HOST_DEVICE int64_t offset(int64_t row) const {
    if constexpr (Team::kSize == 1) return row / positions * stride + row % positions;
    return row * stride;
  }
};

/// The report of a target out of range, in memory that the host may read at any time.
struct BadTarget {
  int64_t row;
  int64_t target;
  int is_set;
};

/// Returns host memory that kernels can write to. It is never freed.
AMPFUSE_CUDA_API BadTarget* allocate_bad_target(CudaCaller& caller);

/// The rows of logits of a call, with their targets and weights. Weights, probabilities and losses
/// are doubles for double logits, else floats.
struct LogitRows {
  const void* logits;
  c10::ScalarType dtype;
  RowsAt at;
  bool are_positions;  // of images: the classes of a row are apart
  int64_t rows;
  int classes;
  const void* target;  // indices; null if targets are probabilities, or if there are no rows
  IndexType index_type;
  int64_t ignore_index;
  const void* weight;         // or null
  const void* probabilities;  // or null
  RowsAt probabilities_at;
  math::LossTerms<double> terms;
  bool is_shard;             // true: targets may be math::kElsewhere
  bool are_targets_checked;  // true: they were validated before
  BadTarget* bad_target;
  bool trap;  // stop the device instead of reporting a bad target
};

/// Sets `total` to the sum of the targets' weights, which are indices.
AMPFUSE_CUDA_API void launch_cross_entropy_weigh(CudaCaller& caller, const LogitRows& rows,
                                                 double* total);

/// The arguments of launch_cross_entropy_forward besides rows, and its results; null if absent.
struct ForwardPointers {
  bool is_mean;
  bool is_per_row;  // `loss` is one per row
  float gradient_limit;
  const float* grad_scale;
  const double* denominator;
  void* loss;
  float* baked_scale;
  double* divisor;
  math::RowStatistics* statistics;
  void* lse;  // like entropy and argmax, one per row
  void* entropy;
  int64_t* argmax;
  void* grad;
  c10::ScalarType grad_dtype;  // that of the logits if there is no gradient
  RowsAt grad_at;
};

AMPFUSE_CUDA_API void launch_cross_entropy_forward(CudaCaller& caller, const LogitRows& rows,
                                                   const ForwardPointers& pointers);

struct BackwardPointers {
  const math::RowStatistics* statistics;
  const double* divisor;
  const double* grad_output;
  bool is_per_row;  // `grad_output` is one per row
  void* grad;
  c10::ScalarType grad_dtype;
  RowsAt grad_at;
};

AMPFUSE_CUDA_API void launch_cross_entropy_backward(CudaCaller& caller, const LogitRows& rows,
                                                    const BackwardPointers& pointers);

/// A gradient as rows of `count` elements, each `stride` after the one before. The last row may be
/// shorter: it ends after `extent` elements.
struct RescaledRows {
  void* grad;
  c10::ScalarType dtype;
  int64_t stride;
  int64_t extent;
  int count;
};

/// `grad_output`: of the dtype of the loss.
AMPFUSE_CUDA_API void launch_cross_entropy_rescale(CudaCaller& caller, const RescaledRows& rows,
                                                   const float* baked_scale,
                                                   const void* grad_output);

/// `argmax`: null if it is not asked for.
AMPFUSE_CUDA_API void launch_cross_entropy_shards_reduce(CudaCaller& caller, const LogitRows& rows,
                                                         math::ShardPartial* partials,
                                                         int64_t* argmax);

/// The partials of all shards, and the results of joining them; null if not asked for.
struct JoinPointers {
  const math::ShardPartial* partials;
  int shards;
  int64_t all_classes;
  double* loss;
  math::RowStatistics* statistics;
  void* lse;
  void* entropy;
  int64_t* argmax;
};

AMPFUSE_CUDA_API void launch_cross_entropy_shards_join(CudaCaller& caller, const LogitRows& rows,
                                                       const JoinPointers& pointers);

}  // namespace ampfuse
