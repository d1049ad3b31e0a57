// The passes over a call's rows: row by row, or tile by tile.
#pragma once

#include "../math/cross_entropy_shards.h"
#include "cross_entropy_rows.h"

namespace ampfuse {

/// What forward leaves. Losses are those of rows where these are asked for, else sums in an order
/// that does not depend on threads: of rows, or of tiles.
struct ForwardResults {
  bool is_each;
  NumberWriter each_loss;
  double* losses;
  math::RowStatistics* statistics;  // or null
  RowWriter grad;
  bool with_metrics;
  NumberWriter lse;
  NumberWriter entropy;
  int64_t* argmax;
};

/// What backward knows.
struct BackwardInputs {
  const math::RowStatistics* statistics;
  const double* upstream;  // one number, or one for each row
  bool is_each;
  double divide_by;

  double scale(int64_t row) const { return upstream[is_each ? row : 0] / divide_by; }
};

/// What rows of a shard of their classes leave; argmax among these, or null.
struct ShardResults {
  math::ShardPart* parts;
  int64_t* argmax;
};

void forward_by_row(const CpuRows& rows, double scale, const ForwardResults& results);
void forward_by_tile(const CpuRows& rows, double scale, const ForwardResults& results);

void backward_by_row(const CpuRows& rows, const BackwardInputs& inputs, const RowWriter& grad);
void backward_by_tile(const CpuRows& rows, const BackwardInputs& inputs, const RowWriter& grad);

void shard_by_row(const CpuRows& rows, const ShardResults& results);
void shard_by_tile(const CpuRows& rows, const ShardResults& results);

/// Rows, or tiles, that make a thread worth its while when each has so many logits.
inline int64_t worth_a_thread(int64_t logits) {
  return std::max<int64_t>(1, 16384 / std::max<int64_t>(1, logits));
}

}  // namespace ampfuse
