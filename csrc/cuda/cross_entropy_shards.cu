#include "cross_entropy_shards.cuh"

#include "../ops/cross_entropy_shards.h"
#include "cross_entropy_launch.h"
#include "stream.h"

namespace ampfuse {

namespace {

template <typename T>
T* data_or_null(const at::Tensor& tensor) {
  return tensor.numel() == 0 ? nullptr : tensor.mutable_data_ptr<T>();
}

// Calls run.operator()<scalar_t>(table) with the table of the arguments. The logits of a shard are
// float or double.
template <typename Run>
void with_table(const CrossEntropyArguments& arguments, const Run& run) {
  const auto with_logits = [&]<typename scalar_t>() {
    at::Tensor converted;
    const auto table = table_of<scalar_t>(arguments, converted);
    run.template operator()<scalar_t>(table);
  };
  if (arguments.input.scalar_type() == at::kDouble)
    return with_logits.template operator()<double>();
  with_logits.template operator()<float>();
}

void reduce(const CrossEntropyArguments& arguments, const ShardOutputs& outputs) {
  check_cross_entropy_memory(arguments);
  const LaunchStream stream(arguments.input);
  auto* const partials = static_cast<math::ShardPartial*>(outputs.partials.mutable_data_ptr());
  auto* const argmax = data_or_null<int64_t>(outputs.argmax);
  with_table(arguments, [&]<typename scalar_t>(const CrossEntropyTable<scalar_t>& table) {
    const auto launch = [&]<typename Team, RowWork kWork>() {
      const int blocks =
          resident_blocks<scalar_t, Team, kWork>(stream.multiprocessors(), table.rows);
      stream.launch(cross_entropy_shards_reduce_kernel<scalar_t, Team, kWork>,
                    LaunchShape{blocks, Team::kBlock}, table, partials, argmax);
    };
    for_rows_not_kept(table.classes * int64_t{sizeof(scalar_t)},
                      is_plain(arguments) && argmax == nullptr, launch);
  });
}

void join(const CrossEntropyArguments& arguments, const at::Tensor& partials,
          const JoinedOutputs& outputs) {
  const LaunchStream stream(partials);
  with_table(arguments, [&]<typename scalar_t>(const CrossEntropyTable<scalar_t>& table) {
    using acc_t = RowAcc<scalar_t>;
    const JoinedResults<acc_t> results = {
        .loss = outputs.loss.mutable_data_ptr<double>(),
        .statistics = outputs.statistics.numel() == 0 ? nullptr
                                                      : static_cast<math::RowStatistics*>(
                                                            outputs.statistics.mutable_data_ptr()),
        .lse = data_or_null<acc_t>(outputs.lse),
        .entropy = data_or_null<acc_t>(outputs.entropy),
        .argmax = data_or_null<int64_t>(outputs.argmax)};
    stream.launch(cross_entropy_shards_join_kernel<scalar_t>, (table.rows + kWarp - 1) / kWarp,
                  table, static_cast<const math::ShardPartial*>(partials.const_data_ptr()),
                  static_cast<int>(partials.size(0)), *arguments.all_classes, results);
  });
}

}  // namespace

constexpr VocabShardKernels kVocabShardsCuda = {reduce, join};

}  // namespace ampfuse
