// The passes over the rows of a call: row by row, or tile by tile.
#pragma once

#include "../math/cross_entropy_shards.h"
#include "cross_entropy_rows.h"

namespace ampfuse {

/// Outputs of forward. If `is_per_row` (reduction "none"), `row_losses` gets the loss of each row.
/// Otherwise `losses` gets the loss of each row or the sum of each tile, so that the caller can add
/// them in an order that does not depend on threads.
struct ForwardResults {
  bool is_per_row;
  NumberWriter row_losses;
  double* losses;
  math::RowStatistics* statistics;  // may be null
  RowWriter grad;
  bool with_metrics;
  NumberWriter lse;
  NumberWriter entropy;
  int64_t* argmax;
};

struct BackwardInputs {
  const math::RowStatistics* statistics;
  const double* grad_output;  // one number, or one per row if `is_per_row`
  bool is_per_row;
  double divisor;

  double scale(int64_t row) const { return grad_output[is_per_row ? row : 0] / divisor; }
};

/// Outputs for the rows of a shard: partial results, and the index of the largest logit among the
/// shard's classes (may be null).
struct ShardResults {
  math::ShardPartial* partials;
  int64_t* argmax;
};

void forward_by_row(const CpuRows& rows, double scale, const ForwardResults& results);
void forward_by_tile(const CpuRows& rows, double scale, const ForwardResults& results);

void backward_by_row(const CpuRows& rows, const BackwardInputs& inputs, const RowWriter& grad);
void backward_by_tile(const CpuRows& rows, const BackwardInputs& inputs, const RowWriter& grad);

void shard_by_row(const CpuRows& rows, const ShardResults& results);
void shard_by_tile(const CpuRows& rows, const ShardResults& results);

/// Returns the number of rows, or tiles, that is worth a thread if each has this many logits.
inline int64_t worth_a_thread(int64_t logits) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, logits));
}

}  // namespace ampfuse
