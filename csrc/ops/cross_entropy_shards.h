// Cross-entropy over classes that are sharded over a group of ranks. Each rank has the logits of
// its own classes; the ranks exchange a few numbers per row, and combine them.
#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/vocab_shard.h>

#include <optional>

#include "cross_entropy.h"

namespace ampfuse {

/// Convert a shard to arguments of an operator, and back: `group`, and `vocab_shard`, which is
/// [group_size, first_class, num_classes]. Both are None without a shard.
NamedValues named(const std::optional<VocabShard>& shard);
std::optional<VocabShard> vocab_shard_from(const FindValue& find);

/// The target of an ignored row in targets_of_shards().
inline constexpr int64_t kIgnoredTarget = -1;
/// Renumbers targets from all classes to those of the shards into which the classes from `begin` to
/// `end` are divided, `classes` in each but the last. Returns [shards, rows]. Targets of other
/// shards become math::kElsewhere, ignored targets kIgnoredTarget.
at::Tensor targets_of_shards(const at::Tensor& targets, int64_t ignore_index, int64_t begin,
                             int64_t end, int64_t classes);

/// Gathers `mine` of all ranks, as [group_size, ...]. On a GPU the host does not wait for other
/// ranks.
at::Tensor gather(const VocabShard& shard, const at::Tensor& mine);

/// Sums over ranks. One sum is in flight at a time.
class ShardSums {
 public:
  /// Finishes the sum in flight, and starts to sum the ranks' `partial`. finish() copies the sum to
  /// `whole`, which may have a narrower dtype.
  void begin(const VocabShard& shard, at::Tensor partial, at::Tensor whole);
  void finish();

 private:
  at::Tensor partial_;
  at::Tensor whole_;
};

/// The results for one shard. partials: [rows, math::kShardPartial] double, which the caller fills
/// with NaN. argmax: [rows], numbered among the shard's classes, or [0] if it is not wanted.
/// Ignored rows are computed only if argmax is wanted.
struct ShardOutputs {
  at::Tensor partials;
  at::Tensor argmax;
};

/// The results for all shards together. loss: [rows] double, 0 for ignored rows. The others are as
/// in CrossEntropyOutputs; the statistics are those of math::JoinedRow, the same for all shards.
struct JoinedOutputs {
  at::Tensor loss;
  at::Tensor statistics;
  at::Tensor lse;
  at::Tensor entropy;
  at::Tensor argmax;
};

/// The functions that a backend implements besides CrossEntropyKernels.
struct VocabShardKernels {
  /// Fills `outputs` from the logits of one shard.
  void (*reduce)(const CrossEntropyArguments& arguments, const ShardOutputs& outputs);
  /// Combines the shards' `partials`: [shards, rows, math::kShardPartial].
  void (*join)(const CrossEntropyArguments& arguments, const at::Tensor& partials,
               const JoinedOutputs& outputs);
};

/// Calls reduce(), and writes the argmax to the partials (their last number), numbered among all
/// classes. `first_class` is the first class of the shard.
void reduce_shard(const VocabShardKernels& kernels, const CrossEntropyArguments& arguments,
                  int64_t first_class, const ShardOutputs& outputs);

extern const VocabShardKernels kVocabShardsCpu;
extern const VocabShardKernels kVocabShardsCuda;

}  // namespace ampfuse
