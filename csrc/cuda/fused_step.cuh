// A step of a fused optimizer for a list of tensors: a launch for the step counters of the tensors,
// and a launch for their elements. A list of several dtypes, or of more tensors than a table holds,
// takes more launches.
//
// fused_step_prepare_kernel, a thread per tensor, increments the step counter unless the step is
// skipped, and writes the result of Rule::step and the gradient factor to a StepPlan.
// fused_step_kernel, a warp per chunk, reads all columns, updates them and writes them. It returns
// at once if the step is skipped.
//
// Bytes per element of Adam, with 16-bit gradients and parameters, fp32 masters and fp32 moments:
// 14 are read (gradient 2, master and moments 12) and 14 written (master and moments 12, parameter
// 2). SGD with momentum takes 20 in total. With remainders as masters, it is 2 less. With fp32
// masters the old parameters are not read, except one element in 128 if masters adopt what other
// code wrote to the parameters.
#pragma once

#include "fused_step_coded.cuh"
#include "fused_step_plain.cuh"

namespace ampfuse {

// `first` is the index in plan.steps of the first tensor of this launch.
template <typename Types>
__global__ void __launch_bounds__(kThreads, Types::kResidentBlocks)
    fused_step_kernel(const __grid_constant__ StepTable<typename Types::rule> table, int64_t first,
                      StepPlan<typename Types::rule, typename Types::acc_t> plan,
                      math::StepOptions options, ExtendedTypes types,
                      typename Types::rule::template Constants<typename Types::acc_t> constants) {
  if (*plan.skip) return;
  const auto grad_factor = *plan.grad_factor;
  for_each_chunk(table, [&](uint32_t, const TableChunk& at, int lane) {
    const StepChunk<Types> chunk = step_chunk<Types>(table, at);
    const auto step = plan.steps[first + at.tensor];
    if constexpr (Types::kMaster == Master::kFloat) {
      if (options.adopt_params) adopt_params(chunk, at.size, lane);
    }
    const int64_t index = step.first_index + at.number * kStepChunk;
    const ChunkArguments<Types> arguments = {grad_factor, options, types, constants, step};
    if constexpr (Types::kIsCoded) {
      step_coded_elements(chunk, at.size, lane, index, arguments);
    } else {
      step_elements(chunk, at.size, lane, index, arguments);
    }
  });
}

}  // namespace ampfuse
