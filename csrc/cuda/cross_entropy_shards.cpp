#include "../ops/cross_entropy_shards.h"

#include "cross_entropy_interface.h"
#include "logit_rows.h"
#include "torch_caller.h"

namespace ampfuse {

namespace {

void reduce(const CrossEntropyArguments& arguments, const ShardOutputs& outputs) {
  check_cross_entropy_memory(arguments);
  TorchCaller caller(arguments.input);
  at::Tensor converted;
  const LogitRows rows = logit_rows(arguments, converted);
  launch_cross_entropy_shards_reduce(
      caller, rows, static_cast<math::ShardPartial*>(outputs.partials.mutable_data_ptr()),
      data_or_null<int64_t>(outputs.argmax));
}

void join(const CrossEntropyArguments& arguments, const at::Tensor& partials,
          const JoinedOutputs& outputs) {
  TorchCaller caller(partials);
  at::Tensor converted;
  const LogitRows rows = logit_rows(arguments, converted);
  const JoinPointers pointers = {
      .partials = static_cast<const math::ShardPartial*>(partials.const_data_ptr()),
      .shards = static_cast<int>(partials.size(0)),
      .all_classes = *arguments.all_classes,
      .loss = outputs.loss.mutable_data_ptr<double>(),
      .statistics = statistics_or_null(outputs.statistics),
      .lse = data_or_null(outputs.lse),
      .entropy = data_or_null(outputs.entropy),
      .argmax = data_or_null<int64_t>(outputs.argmax)};
  launch_cross_entropy_shards_join(caller, rows, pointers);
}

}  // namespace

constexpr VocabShardKernels kVocabShardsCuda = {reduce, join};

}  // namespace ampfuse
