// Rows whose classes several processes have, some each. What one tells of its own is ten numbers,
// and all that it needs to know of the others'.
#pragma once

#include "cross_entropy.h"

namespace ampfuse::math {

/// Of a row's classes here. `others` are those that are not its target.
struct ShardPart {
  RowPart<double> others;
  double has_target;  // 1, or 0 where the target is elsewhere, or no single class
  double target_z;
  double target_share;
  double argmax;  // among all classes; only of rows that are asked for metrics
};
inline constexpr int kShardPart = sizeof(ShardPart) / sizeof(double);

template <typename V>
AMPFUSE_HOST_DEVICE ShardPart shard_part(const RowPart<V>& others, const RowTarget<V>& target) {
  return {
      {others.largest, others.reference, others.sum, others.shares, others.spread, others.entropy},
      target.exists ? 1.0 : 0.0,
      target.z,
      target.share,
      0};
}

struct WholeRow {
  RowPart<double> others;
  RowTarget<double> target;
  double argmax = 0;
};

/// Of `count` shards, whose parts are `stride` apart. A target that not exactly one of them has
/// makes its row no number.
AMPFUSE_HOST_DEVICE WholeRow join_shards(const ShardPart* parts, int64_t stride, int count,
                                         bool is_index) {
  WholeRow whole;
  double found = 0;
  for (int shard = 0; shard < count; ++shard) {
    const ShardPart part = parts[shard * stride];
    const double best = whole.others.largest;
    const double here = part.others.largest;
    // The first of the largest; a NaN is larger than all numbers.
    if (shard == 0 || here > best || (here != here && best == best)) whole.argmax = part.argmax;
    whole.others = join(whole.others, part.others);
    if (part.has_target == 0) continue;
    found += 1;
    whole.target = {true, part.target_z, part.target_share};
  }
  if (is_index && found != 1) whole.target = {true, NAN, NAN};
  return whole;
}

/// What backward needs of a row's classes here. A target that is elsewhere weighs as much as any of
/// the others, and like them has no exponential here.
AMPFUSE_HOST_DEVICE RowStatistics shard_statistics(RowStatistics whole,
                                                   const RowTarget<double>& target, bool is_here) {
  if (target.exists && !is_here) whole.shares += target.share;
  return whole;
}

}  // namespace ampfuse::math
