// Rows whose classes are divided among ranks. reduce() computes the partial sums of this rank's
// classes, and join() combines the partial sums of all ranks.
#include "../ops/cross_entropy_shards.h"

#include <ATen/Parallel.h>

#include "cross_entropy_passes.h"

namespace ampfuse {

namespace {

void reduce(const CrossEntropyArguments& arguments, const ShardOutputs& outputs) {
  check_cross_entropy_memory(arguments);
  const CpuRows rows(arguments);
  const ShardResults results = {
      static_cast<math::ShardPartial*>(outputs.partials.mutable_data_ptr()),
      outputs.argmax.numel() > 0 ? outputs.argmax.mutable_data_ptr<int64_t>() : nullptr};
  rows.are_tiled() ? shard_by_tile(rows, results) : shard_by_row(rows, results);
}

void join(const CrossEntropyArguments& arguments, const at::Tensor& partials,
          const JoinedOutputs& outputs) {
  const CpuRows rows(arguments);
  const auto* const first = static_cast<const math::ShardPartial*>(partials.const_data_ptr());
  auto* const statistics = static_cast<math::RowStatistics*>(outputs.statistics.mutable_data_ptr());
  const bool with_metrics = outputs.lse.numel() > 0;
  const NumberWriter loss(outputs.loss);
  const NumberWriter lse(outputs.lse);
  const NumberWriter entropy(outputs.entropy);
  auto* const argmax = outputs.argmax.mutable_data_ptr<int64_t>();
  const auto shards = static_cast<int>(partials.size(0));
  const int64_t all_classes = *arguments.all_classes;
  at::parallel_for(0, rows.count(), 1024, [&](int64_t begin, int64_t end) {
    for (int64_t row = begin; row < end; ++row) {
      const math::JoinedRow known =
          math::joined_row(first + row, rows.count(), shards, all_classes,
                           !rows.has_probabilities(), rows.is_ignored(row), rows.terms());
      loss.put(row, known.loss);
      if (statistics != nullptr) statistics[row] = known.statistics;
      if (!with_metrics) continue;
      lse.put(row, known.lse);
      entropy.put(row, known.entropy);
      argmax[row] = known.argmax;
    }
  });
}

}  // namespace

constexpr VocabShardKernels kVocabShardsCpu = {reduce, join};

}  // namespace ampfuse
