#include "class_shards.h"

#include <ATen/TensorOperators.h>
#include <ATen/core/dispatch/Dispatcher.h>
#include <ATen/ops/where.h>

#include "../math/class_shards.h"

namespace ampfuse {

namespace {

at::Tensor finished(const at::Tensor& begun) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("_c10d_functional::wait_tensor", "")
                             .typed<at::Tensor(const at::Tensor&)>();
  return op.call(begun);
}

}  // namespace

std::optional<ClassShard> class_shard_of(std::optional<c10::string_view> group,
                                         at::OptionalIntArrayRef numbers) {
  if (!group) return std::nullopt;
  TORCH_CHECK_VALUE(numbers && numbers->size() == 3,
                    "class_shard: expected [group_size, first_class, num_classes]");
  const int64_t size = (*numbers)[0];
  const int64_t first = (*numbers)[1];
  const int64_t classes = (*numbers)[2];
  TORCH_CHECK_VALUE(size > 0 && first >= 0 && first <= classes,
                    "class_shard: expected [group_size, first_class, num_classes], got ", *numbers);
  return ClassShard{std::string(*group), size, first, classes};
}

ClassShardArguments::ClassShardArguments(const std::optional<ClassShard>& shard) {
  if (!shard) return;
  group_ = shard->group;
  numbers_ = {shard->group_size, shard->first_class, shard->num_classes};
}

at::Tensor targets_of_shard(const ClassShard& shard, const at::Tensor& targets,
                            int64_t ignore_index, int64_t classes) {
  const at::Tensor among = targets.to(at::kLong) - shard.first_class;
  const at::Tensor is_here = among.ge(0).logical_and(among.lt(classes));
  const at::Tensor here = at::where(is_here, among, math::kElsewhere);
  return at::where(targets.eq(ignore_index), kIgnoredTarget, here);
}

at::Tensor gather(const ClassShard& shard, const at::Tensor& mine) {
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("_c10d_functional::all_gather_into_tensor", "")
                             .typed<at::Tensor(const at::Tensor&, int64_t, std::string)>();
  std::vector<int64_t> shape = {shard.group_size};
  shape.insert(shape.end(), mine.sizes().begin(), mine.sizes().end());
  return finished(op.call(mine, shard.group_size, shard.group)).view(shape);
}

void ShardSums::begin(at::Tensor sum) {
  if (!shard_) return;
  static const auto op = c10::Dispatcher::singleton()
                             .findSchemaOrThrow("_c10d_functional::all_reduce_", "")
                             .typed<at::Tensor&(at::Tensor&, std::string, std::string)>();
  op.call(sum, "sum", shard_->group);
  begun_.push_back(std::move(sum));
}

void ShardSums::finish() {
  for (const at::Tensor& sum : begun_) finished(sum);
  begun_.clear();
}

}  // namespace ampfuse
