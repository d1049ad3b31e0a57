#include "fused_adam.cuh"

#include <ATen/ops/empty.h>

#include <algorithm>

#include "fused_adam_dispatch.h"
#include "stream.h"

namespace ampfuse {

namespace {

// Returns a scalar as the kernel reads it: a pointer to device memory, or a CPU tensor's value.
AdamScalar scalar_of(const at::Tensor& tensor) {
  const bool is_double = tensor.scalar_type() == at::kDouble;
  if (tensor.is_cpu()) return {nullptr, is_double, tensor.item<double>()};
  return {tensor.const_data_ptr(), is_double, 0};
}

AdamSignals signals_of(const FusedAdamArguments& arguments) {
  const auto floats = [](const std::optional<at::Tensor>& tensor) {
    return tensor ? tensor->const_data_ptr<float>() : nullptr;
  };
  return {floats(arguments.found_inf),
          floats(arguments.grad_scale),
          arguments.total_norm ? scalar_of(*arguments.total_norm) : AdamScalar{},
          arguments.total_norm.has_value(),
          arguments.max_norm,
          arguments.grad_norm ? arguments.grad_norm->mutable_data_ptr<float>() : nullptr,
          scalar_of(arguments.lr)};
}

// The device memory of a plan. It may be freed before the kernels finish: the caching allocator
// reuses it only on the same stream.
template <typename acc_t>
class PlanMemory {
 public:
  PlanMemory(size_t tensors, c10::Device device) {
    const size_t bytes = tensors * sizeof(math::AdamStep<acc_t>) + sizeof(acc_t) + sizeof(bool);
    bytes_ = at::empty({static_cast<int64_t>(bytes)},
                       at::TensorOptions().device(device).dtype(at::kByte));
    plan.steps = reinterpret_cast<math::AdamStep<acc_t>*>(bytes_.mutable_data_ptr());
    plan.grad_factor = reinterpret_cast<acc_t*>(plan.steps + tensors);
    plan.skip = reinterpret_cast<bool*>(plan.grad_factor + 1);
  }

  AdamPlan<acc_t> plan;

 private:
  at::Tensor bytes_;
};

// Launches fused_adam_prepare_kernel for all groups. plan.steps is in the order of their tensors.
template <typename acc_t>
void launch_prepare(const LaunchStream& stream, const FusedAdamArguments& arguments,
                    const std::vector<AdamDtypeGroup>& groups, const AdamPlan<acc_t>& plan) {
  const AdamSignals signals = signals_of(arguments);
  int64_t first = 0;
  auto builder = build_tables<StepTable>([&](const StepTable& table) {
    stream.launch(fused_adam_prepare_kernel<acc_t>, (table.count + kWarp - 1) / kWarp, table, first,
                  arguments.options, signals, plan);
    first += table.count;
  });
  for (const AdamDtypeGroup& group : groups) {
    for (const AdamTensor& tensor : group.tensors) builder.add({tensor.step}, 1);
  }
  builder.flush();
}

template <typename Types>
void launch_update(const LaunchStream& stream, const math::AdamOptions& options,
                   const std::vector<AdamTensor>& tensors, int64_t first,
                   const AdamPlan<typename Types::acc_t>& plan) {
  const auto constants = math::adam_constants<typename Types::acc_t>(options);
  auto builder = build_tables<AdamTable>([&](const AdamTable& table) {
    stream.launch(fused_adam_kernel<Types>, table.chunks(), table, first, plan, constants);
    first += table.count;
  });
  for (const AdamTensor& tensor : tensors) builder.add(tensor.data, tensor.size);
  builder.flush();
}

// Launches one preparation for all groups whose arithmetic is in acc_t, then one update per group.
template <typename acc_t>
void launch_groups(const LaunchStream& stream, const FusedAdamArguments& arguments,
                   const std::vector<AdamDtypeGroup>& groups) {
  size_t tensors = 0;
  for (const AdamDtypeGroup& group : groups) tensors += group.tensors.size();
  if (tensors == 0) return;
  const PlanMemory<acc_t> memory(tensors, arguments.tensor(math::kParam, 0).device());
  launch_prepare(stream, arguments, groups, memory.plan);
  int64_t first = 0;
  for (const AdamDtypeGroup& group : groups) {
    dispatch_adam<acc_t>(group.dtypes, arguments.options.amsgrad, [&]<typename Types>() {
      launch_update<Types>(stream, arguments.options, group.tensors, first, memory.plan);
    });
    first += static_cast<int64_t>(group.tensors.size());
  }
}

}  // namespace

void fused_adam_cuda(const FusedAdamArguments& arguments) {
  if (arguments.count() == 0) return;
  const AdamTensors tensors(arguments);
  const LaunchStream stream(arguments.tensor(math::kParam, 0));
  std::vector<AdamDtypeGroup> groups = group_by_dtypes(tensors.get());
  const auto first_double = std::stable_partition(
      groups.begin(), groups.end(),
      [](const AdamDtypeGroup& group) { return group.dtypes.param != at::kDouble; });
  launch_groups<float>(stream, arguments, {groups.begin(), first_double});
  launch_groups<double>(stream, arguments, {first_double, groups.end()});
  tensors.write_back();
}

}  // namespace ampfuse
