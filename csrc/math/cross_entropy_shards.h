// Cross-entropy of rows whose classes are split over several ranks. Each rank reduces its own
// classes of a row to eleven numbers, and needs only these eleven numbers from the other ranks.
#pragma once

#include "cross_entropy.h"

namespace ampfuse::math {

/// A row's partial sums over the classes of one shard.
struct ShardPartial {
  RowPartial<double> others;  // over the classes except the target
  double has_target;          // 1, or 0 if the target is on another shard or is not a single class
  double target_z;
  double target_mass;
  double classes;  // number of classes of this shard
  double argmax;   // index among the classes of all shards, or NaN if not asked for
};
inline constexpr int kShardPartial = sizeof(ShardPartial) / sizeof(double);

template <typename V>
AMPFUSE_HOST_DEVICE ShardPartial shard_partial(const RowPartial<V>& others,
                                               const RowTarget<V>& target, int64_t classes,
                                               bool with_metrics) {
  return {{others.largest, others.reference, others.sum, others.masses, others.spread,
           with_metrics ? static_cast<double>(others.entropy) : NAN},
          target.exists ? 1.0 : 0.0,
          target.z,
          target.mass,
          static_cast<double>(classes),
          NAN};
}

struct WholeRow {
  RowPartial<double> others;
  RowTarget<double> target;
  int64_t argmax = -1;
};

/// Combines the partials of `count` shards, which are `stride` elements apart. The row becomes NaN
/// unless the shards have `all_classes` classes in total and, if `needs_target` (an index target
/// that is not ignored), exactly one of them has the target.
AMPFUSE_HOST_DEVICE WholeRow join_shards(const ShardPartial* partials, int64_t stride, int count,
                                         int64_t all_classes, bool needs_target) {
  WholeRow whole;
  double found = 0;
  double classes = 0;
  double argmax = 0;
  for (int shard = 0; shard < count; ++shard) {
    const ShardPartial partial = partials[shard * stride];
    const double best = whole.others.largest;
    const double largest = partial.others.largest;
    // argmax is the first class with the largest logit; NaN is larger than every number.
    const bool is_above = largest > best || (largest != largest && best == best);
    const bool is_as_high = largest == best || (largest != largest && best != best);
    if (shard == 0 || is_above || (is_as_high && !(partial.argmax > argmax)))
      argmax = partial.argmax;
    whole.others = join(whole.others, partial.others);
    classes += partial.classes;
    if (partial.has_target == 0) continue;
    found += 1;
    whole.target = {true, partial.target_z, partial.target_mass};
  }
  if (needs_target && found != 1) whole.target = {true, NAN, NAN};
  if (classes != static_cast<double>(all_classes)) whole.others.largest = NAN;
  if (argmax == argmax) whole.argmax = static_cast<int64_t>(argmax);
  return whole;
}

/// The results of a row over the classes of all shards.
struct JoinedRow {
  double loss;  // 0 if the row is ignored
  double lse;
  double entropy;
  RowStatistics statistics;  // the same for all shards: `masses` includes that of the target
  int64_t argmax;
};

/// Returns the results of a row from the partials of all shards; see join_shards for the first four
/// arguments.
template <typename Terms>
AMPFUSE_HOST_DEVICE JoinedRow joined_row(const ShardPartial* partials, int64_t stride, int count,
                                         int64_t all_classes, bool has_index, bool is_ignored,
                                         const Terms& terms) {
  const WholeRow whole =
      join_shards(partials, stride, count, all_classes, has_index && !is_ignored);
  const RowLoss<double> known = row_loss(whole.others, whole.target, terms);
  RowStatistics statistics = known.statistics;
  if (whole.target.exists) statistics.masses += whole.target.mass;
  if (is_ignored) statistics = {};
  return {is_ignored ? 0 : known.loss, known.lse, known.entropy, statistics, whole.argmax};
}

/// Returns the statistics from which the gradient of one shard's classes is computed.
/// `target_mass`: B of the target if it is on this shard, else 0: then the gradient of this shard
/// has no target class.
AMPFUSE_HOST_DEVICE RowStatistics of_shard(RowStatistics joined, double target_mass) {
  joined.masses -= target_mass;  // exactly 0 if the other classes have no masses
  return joined;
}

}  // namespace ampfuse::math
