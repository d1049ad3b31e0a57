// Launches the kernels of fused_step.cuh.
#pragma once

#include <algorithm>
#include <type_traits>

#include "fused_step_dispatch.cuh"
#include "stream.cuh"

namespace ampfuse {

// Returns a plan of a number of tensors, in memory of the caller.
template <typename Rule, typename acc_t>
StepPlan<Rule, acc_t> empty_plan(CudaCaller& caller, size_t tensors) {
  StepPlan<Rule, acc_t> plan;
  using Tensor = std::remove_pointer_t<decltype(plan.steps)>;
  void* const memory = caller.allocate(tensors * sizeof(Tensor) + sizeof(acc_t) + sizeof(bool));
  plan.steps = static_cast<Tensor*>(memory);
  plan.grad_factor = reinterpret_cast<acc_t*>(plan.steps + tensors);
  plan.skip = reinterpret_cast<bool*>(plan.grad_factor + 1);
  return plan;
}

// Launches fused_step_prepare_kernel for all groups. plan.steps is in the order of their tensors.
template <typename Rule, typename acc_t>
void launch_prepare(const LaunchStream& stream, const StepCall<Rule>& call,
                    const std::vector<StepDtypeGroup>& groups, const StepPlan<Rule, acc_t>& plan) {
  int64_t first = 0;
  auto builder = build_tables<CounterTable>([&](const CounterTable& table) {
    stream.launch(fused_step_prepare_kernel<Rule, acc_t>, (table.count + kWarp - 1) / kWarp, table,
                  first, call.rule_options, call.signals, plan);
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
void launch_update(const LaunchStream& stream, const StepCall<Rule>& call,
                   const std::vector<StepTensor>& tensors, int64_t first,
                   const StepPlan<Rule, typename Types::acc_t>& plan) {
  const typename Rule::template Constants<typename Types::acc_t> constants(call.rule_options);
  using Table = StepTable<Rule>;
  const ExtendedTypes types = {number_type(tensors[0].dtypes.grad),
                               number_type(tensors[0].dtypes.ema)};
  auto builder = build_tables<Table>(
      [&](const Table& table) {
        stream.launch(fused_step_kernel<Types>, table.chunks(), table, first, plan, call.options,
                      types, constants);
        first += table.count;
      },
      Types::kIsExtended ? math::kMostColumns : Table::kColumns);
  for (const StepTensor& tensor : tensors) builder.add_columns(tensor.data.data(), tensor.size);
  builder.flush();
}

// Launches one preparation for all groups whose arithmetic is in acc_t, then one update per group.
template <typename acc_t, typename Rule>
void launch_groups(CudaCaller& caller, const LaunchStream& stream, const StepCall<Rule>& call,
                   const std::vector<StepDtypeGroup>& groups) {
  size_t tensors = 0;
  for (const StepDtypeGroup& group : groups) tensors += group.tensors.size();
  if (tensors == 0) return;
  const auto plan = empty_plan<Rule, acc_t>(caller, tensors);
  launch_prepare(stream, call, groups, plan);
  int64_t first = 0;
  for (const StepDtypeGroup& group : groups) {
    const bool extended = is_extended(group.dtypes, call.options.round_at_random);
    dispatch_step<Rule, acc_t>(group.dtypes, extended, call.moments, [&]<typename Types>() {
      launch_update<Types>(stream, call, group.tensors, first, plan);
    });
    first += static_cast<int64_t>(group.tensors.size());
  }
}

template <typename Rule>
void launch_step(CudaCaller& caller, const StepCall<Rule>& call) {
  const LaunchStream stream(caller);
  std::vector<StepDtypeGroup> groups = group_by_dtypes(call.tensors);
  const auto first_double = std::stable_partition(
      groups.begin(), groups.end(),
      [](const StepDtypeGroup& group) { return group.dtypes.param != c10::ScalarType::Double; });
  launch_groups<float>(caller, stream, call, {groups.begin(), first_double});
  launch_groups<double>(caller, stream, call, {first_double, groups.end()});
}

}  // namespace ampfuse
