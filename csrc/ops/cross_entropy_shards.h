// Classes that a group of processes shares out: each has the logits of its own, and what all have
// to say of a row is put together.
#pragma once

#include <ATen/core/Tensor.h>
#include <ampfuse/vocab_shard.h>

#include <optional>
#include <utility>
#include <vector>

#include "cross_entropy.h"

namespace ampfuse {

/// A shard as arguments of an operator, and back: `group`, and `vocab_shard`, which is
/// [group_size, first_class, num_classes]. Both are None without a shard.
NamedValues named(const std::optional<VocabShard>& shard);
std::optional<VocabShard> vocab_shard_from(const FindValue& find);

/// As a shard of so many classes sees targets that are numbered among all: numbered among its own.
/// Those that are not among them are math::kElsewhere, ignored ones kIgnoredTarget.
inline constexpr int64_t kIgnoredTarget = -1;
at::Tensor targets_of_shard(const VocabShard& shard, const at::Tensor& targets,
                            int64_t ignore_index, int64_t classes);

/// [group_size, ...]: what each process has, which waits for none on the host of a GPU.
at::Tensor gather(const VocabShard& shard, const at::Tensor& mine);

/// Sums over processes, one of which is under way at a time.
class ShardSums {
 public:
  /// Of each process's `part`; it goes to `whole`, which may be narrower.
  void begin(const VocabShard& shard, at::Tensor part, at::Tensor whole);
  void finish();

 private:
  at::Tensor part_;
  at::Tensor whole_;
};

/// Of a shard. parts: [rows, math::kShardPart] double, NaN before; argmax: [rows] among the classes
/// here, or [0]. Of rows that are ignored, only with argmax.
struct ShardOutputs {
  at::Tensor parts;
  at::Tensor argmax;
};

/// Of all shards together. loss: [rows] double, zeros where rows are ignored; the others as
/// CrossEntropyOutputs has them, statistics as the gradient of the shard's logits needs them.
struct JoinedOutputs {
  at::Tensor loss;
  at::Tensor statistics;
  at::Tensor lse;
  at::Tensor entropy;
  at::Tensor argmax;
};

/// What a backend brings beside CrossEntropyKernels.
struct VocabShardKernels {
  void (*look)(const CrossEntropyArguments& arguments, const ShardOutputs& outputs);
  /// `parts`: [shards, rows, math::kShardPart].
  void (*join)(const CrossEntropyArguments& arguments, const at::Tensor& parts,
               const JoinedOutputs& outputs);
};

/// The backends.
extern const VocabShardKernels kVocabShardsCpu;
extern const VocabShardKernels kVocabShardsCuda;

}  // namespace ampfuse
