// Rows whose classes several processes have, some each. What one tells of its own is eleven
// numbers, and all that it needs to know of the others'.
#pragma once

#include "cross_entropy.h"

namespace ampfuse::math {

/// Of a row's classes here. `others` are those that are not its target.
struct ShardPart {
  RowPart<double> others;
  double has_target;  // 1, or 0 where the target is elsewhere, or no single class
  double target_z;
  double target_share;
  double classes;  // how many there are here
  double argmax;   // among all classes, or NaN where nobody asked for it
};
inline constexpr int kShardPart = sizeof(ShardPart) / sizeof(double);

template <typename V>
AMPFUSE_HOST_DEVICE ShardPart shard_part(const RowPart<V>& others, const RowTarget<V>& target,
                                         int64_t classes, bool with_metrics) {
  return {{others.largest, others.reference, others.sum, others.shares, others.spread,
           with_metrics ? static_cast<double>(others.entropy) : NAN},
          target.exists ? 1.0 : 0.0,
          target.z,
          target.share,
          static_cast<double>(classes),
          NAN};
}

struct WholeRow {
  RowPart<double> others;
  RowTarget<double> target;
  int64_t argmax = -1;
};

/// Of `count` shards, whose parts are `stride` apart. Classes that are not all there are, and a
/// target that not exactly one shard has, make a row no number.
AMPFUSE_HOST_DEVICE WholeRow join_shards(const ShardPart* parts, int64_t stride, int count,
                                         int64_t all_classes, bool is_index) {
  WholeRow whole;
  double found = 0;
  double classes = 0;
  double argmax = 0;
  for (int shard = 0; shard < count; ++shard) {
    const ShardPart part = parts[shard * stride];
    const double best = whole.others.largest;
    const double here = part.others.largest;
    // The first class of the largest; a NaN is larger than all numbers.
    const bool is_above = here > best || (here != here && best == best);
    const bool is_as_high = here == best || (here != here && best != best);
    if (shard == 0 || is_above || (is_as_high && !(part.argmax > argmax))) argmax = part.argmax;
    whole.others = join(whole.others, part.others);
    classes += part.classes;
    if (part.has_target == 0) continue;
    found += 1;
    whole.target = {true, part.target_z, part.target_share};
  }
  if (is_index && found != 1) whole.target = {true, NAN, NAN};
  if (classes != static_cast<double>(all_classes)) whole.others.largest = NAN;
  if (argmax == argmax) whole.argmax = static_cast<int64_t>(argmax);
  return whole;
}

/// What there is to know of a row of all classes.
struct JoinedRow {
  double loss;  // 0 where it is ignored
  double lse;
  double entropy;
  RowStatistics statistics;  // as the gradient of the classes here needs them
  int64_t argmax;
};

/// As join_shards. `is_here`: whether its target is among the classes here. One that is elsewhere
/// weighs as much as any of the others here, and like them has no exponential.
template <typename Terms>
AMPFUSE_HOST_DEVICE JoinedRow joined_row(const ShardPart* parts, int64_t stride, int count,
                                         int64_t all_classes, bool has_index, bool is_ignored,
                                         bool is_here, const Terms& terms) {
  const WholeRow whole = join_shards(parts, stride, count, all_classes, has_index && !is_ignored);
  const RowLoss<double> known = row_loss(whole.others, whole.target, terms);
  RowStatistics statistics = known.statistics;
  if (whole.target.exists && !is_here) statistics.shares += whole.target.share;
  if (is_ignored) statistics = {};
  return {is_ignored ? 0 : known.loss, known.lse, known.entropy, statistics, whole.argmax};
}

}  // namespace ampfuse::math
