#include "cross_entropy_shards.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/arange.h>
#include <ATen/ops/where.h>

#include <algorithm>
#include <utility>

#include "../math/cross_entropy_shards.h"
#include "named_arguments.h"

namespace ampfuse {

namespace {

// Makes a boxed call, because torch changed the schema type of the group's name, a string, from str
// to Any.
at::Tensor collective(const char* name, std::vector<c10::IValue> arguments) {
  c10::Dispatcher::singleton().findSchemaOrThrow(name, "").callBoxed(arguments);
  return arguments.front().toTensor();  // the result has replaced the arguments
}

at::Tensor finished(const at::Tensor& begun) {
  return collective("_c10d_functional::wait_tensor", {begun});
}

}  // namespace

NamedValues named(const std::optional<VocabShard>& shard) {
  if (!shard) return {{"group", {}}, {"vocab_shard", {}}};
  return {{"group", shard->group},
          {"vocab_shard",
           std::vector<int64_t>{shard->group_size, shard->first_class, shard->num_classes}}};
}

std::optional<VocabShard> vocab_shard_from(const FindValue& find) {
  const c10::IValue& group = *find("group");
  const c10::IValue& numbers = *find("vocab_shard");
  TORCH_CHECK_VALUE(!group.isNone() || numbers.isNone(),
                    "linear_cross_entropy: group: expected the name of a process group, since "
                    "vocab_shard is set, got None");
  if (group.isNone()) return std::nullopt;
  const auto shard = numbers.isNone() ? std::vector<int64_t>() : numbers.toIntVector();
  TORCH_CHECK_VALUE(
      shard.size() == 3 && shard[0] > 0 && shard[1] >= 0 && shard[1] <= shard[2],
      "linear_cross_entropy: vocab_shard: expected [group_size, first_class, num_classes], got ",
      shard);
  return VocabShard{group.toStringRef(), shard[0], shard[1], shard[2]};
}

at::Tensor targets_of_shards(const at::Tensor& targets, int64_t ignore_index, int64_t begin,
                             int64_t end, int64_t classes) {
  // Compare as int64: in uint8 an ignore_index of -100 would be 156.
  const at::Tensor wide = targets.to(at::kLong);
  const at::Tensor first =
      at::arange(begin, std::max(end, begin + 1), std::max<int64_t>(classes, 1), wide.options());
  const at::Tensor among = wide - first.unsqueeze(1);
  const at::Tensor is_here = among.ge(0).logical_and_(among.lt(classes)).logical_and_(wide.lt(end));
  const at::Tensor renumbered = at::where(is_here, among, math::kElsewhere);
  return at::where(wide.eq(ignore_index), kIgnoredTarget, renumbered);
}

at::Tensor gather(const VocabShard& shard, const at::Tensor& mine) {
  std::vector<int64_t> shape = {shard.group_size};
  shape.insert(shape.end(), mine.sizes().begin(), mine.sizes().end());
  const at::Tensor all =
      collective("_c10d_functional::all_gather_into_tensor", {mine, shard.group_size, shard.group});
  return finished(all).view(shape);
}

void reduce_shard(const VocabShardKernels& kernels, const CrossEntropyArguments& arguments,
                  int64_t first_class, const ShardOutputs& outputs) {
  kernels.reduce(arguments, outputs);
  if (outputs.argmax.numel() == 0) return;
  outputs.partials.select(1, math::kShardPartial - 1).copy_(outputs.argmax + first_class);
}

void ShardSums::begin(const VocabShard& shard, at::Tensor partial, at::Tensor whole) {
  finish();
  partial_ = std::move(partial);
  whole_ = std::move(whole);
  collective("_c10d_functional::all_reduce_", {partial_, "sum", shard.group});
}

void ShardSums::finish() {
  if (!partial_.defined()) return;
  whole_.copy_(finished(partial_));
  partial_.reset();
}

}  // namespace ampfuse
