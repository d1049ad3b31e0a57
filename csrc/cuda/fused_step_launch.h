// Launches the kernels of fused_step.cuh for the arguments of an operator.
#pragma once

#include <ATen/ops/empty.h>

#include <algorithm>

#include "fused_step_dispatch.h"
#include "stream.h"

namespace ampfuse {

// Returns a scalar as the kernel reads it: a pointer to device memory, or a CPU tensor's value.
inline StepScalar scalar_of(const at::Tensor& tensor) {
  const bool is_double = tensor.scalar_type() == at::kDouble;
  if (tensor.is_cpu()) return {nullptr, is_double, tensor.item<double>()};
  return {tensor.const_data_ptr(), is_double, 0};
}

inline StepSignals signals_of(const FusedStepArguments& arguments) {
  const auto floats = [](const std::optional<at::Tensor>& tensor) {
    return tensor ? tensor->const_data_ptr<float>() : nullptr;
  };
  return {floats(arguments.found_inf),
          floats(arguments.grad_scale),
          arguments.total_norm ? scalar_of(*arguments.total_norm) : StepScalar{},
          arguments.total_norm.has_value(),
          arguments.max_norm,
          arguments.grad_norm ? arguments.grad_norm->mutable_data_ptr<float>() : nullptr,
          scalar_of(arguments.lr)};
}

// The device memory of a plan. It may be freed before the kernels finish: the caching allocator
// reuses it only on the same stream.
template <typename Rule, typename acc_t>
class PlanMemory {
 public:
  PlanMemory(size_t tensors, c10::Device device) {
    using Step = math::TensorStep<typename Rule::template Step<acc_t>>;
    const size_t bytes = tensors * sizeof(Step) + sizeof(acc_t) + sizeof(bool);
    bytes_ = at::empty({static_cast<int64_t>(bytes)},
                       at::TensorOptions().device(device).dtype(at::kByte));
    plan.steps = reinterpret_cast<Step*>(bytes_.mutable_data_ptr());
    plan.grad_factor = reinterpret_cast<acc_t*>(plan.steps + tensors);
    plan.skip = reinterpret_cast<bool*>(plan.grad_factor + 1);
  }

  StepPlan<Rule, acc_t> plan;

 private:
  at::Tensor bytes_;
};

// Launches fused_step_prepare_kernel for all groups. plan.steps is in the order of their tensors.
template <typename Rule, typename acc_t>
void launch_prepare(const LaunchStream& stream, const FusedRuleArguments<Rule>& arguments,
                    const std::vector<StepDtypeGroup>& groups, const StepPlan<Rule, acc_t>& plan) {
  const StepSignals signals = signals_of(arguments);
  int64_t first = 0;
  auto builder = build_tables<CounterTable>([&](const CounterTable& table) {
    stream.launch(fused_step_prepare_kernel<Rule, acc_t>, (table.count + kWarp - 1) / kWarp, table,
                  first, arguments.rule_options, signals, plan);
    first += table.count;
  });
  for (const StepDtypeGroup& group : groups) {
    for (const StepTensor& tensor : group.tensors) {
      builder.add({tensor.step, reinterpret_cast<void*>(tensor.first_index)}, 1);
    }
  }
  builder.flush();
}

template <typename Types, typename Rule>
void launch_update(const LaunchStream& stream, const FusedRuleArguments<Rule>& arguments,
                   const std::vector<StepTensor>& tensors, int64_t first,
                   const StepPlan<Rule, typename Types::acc_t>& plan) {
  const typename Rule::template Constants<typename Types::acc_t> constants(arguments.rule_options);
  using Table = StepTable<Rule>;
  const ExtendedTypes types = {number_type(tensors[0].dtypes.grad),
                               number_type(tensors[0].dtypes.ema)};
  auto builder = build_tables<Table>(
      [&](const Table& table) {
        stream.launch(fused_step_kernel<Types>, table.chunks(), table, first, plan,
                      arguments.options, types, constants);
        first += table.count;
      },
      Types::kIsExtended ? math::kMostColumns : Table::kColumns);
  for (const StepTensor& tensor : tensors) builder.add_columns(tensor.data.data(), tensor.size);
  builder.flush();
}

// Launches one preparation for all groups whose arithmetic is in acc_t, then one update per group.
template <typename acc_t, typename Rule>
void launch_groups(const LaunchStream& stream, const FusedRuleArguments<Rule>& arguments,
                   const std::vector<StepDtypeGroup>& groups) {
  size_t tensors = 0;
  for (const StepDtypeGroup& group : groups) tensors += group.tensors.size();
  if (tensors == 0) return;
  const PlanMemory<Rule, acc_t> memory(tensors, arguments.tensor(math::kParam, 0).device());
  launch_prepare(stream, arguments, groups, memory.plan);
  int64_t first = 0;
  for (const StepDtypeGroup& group : groups) {
    const bool extended = is_extended(group.dtypes, arguments.options.round_at_random);
    dispatch_step<Rule, acc_t>(group.dtypes, extended, arguments.moments, [&]<typename Types>() {
      launch_update<Types>(stream, arguments, group.tensors, first, memory.plan);
    });
    first += static_cast<int64_t>(group.tensors.size());
  }
}

/// The CUDA kernel of an optimizer's operator.
template <typename Rule>
void fused_step_cuda(const FusedRuleArguments<Rule>& arguments) {
  if (arguments.count() == 0) return;
  const StepTensors tensors(arguments);
  const LaunchStream stream(arguments.tensor(math::kParam, 0));
  std::vector<StepDtypeGroup> groups = group_by_dtypes(tensors.get());
  const auto first_double = std::stable_partition(
      groups.begin(), groups.end(),
      [](const StepDtypeGroup& group) { return group.dtypes.param != at::kDouble; });
  launch_groups<float>(stream, arguments, {groups.begin(), first_double});
  launch_groups<double>(stream, arguments, {first_double, groups.end()});
  tensors.write_back();
}

}  // namespace ampfuse
