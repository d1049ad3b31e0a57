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

#include <type_traits>

#include "../math/fused_step.h"
#include "../math/split_float.h"
#include "multi_tensor.cuh"
#include "vectorized.cuh"

namespace ampfuse {

// How a parameter's master is stored (math::kMaster).
enum class Master { kNone, kFloat, kRemainder };

// Chunks are small, so that a warp's last chunk does not take long. The chunk size does not affect
// the bytes that a multiprocessor has in flight: 1024 threads load kPackSize elements each.
inline constexpr int kStepChunk = 2048;

template <typename Rule>
using StepTable = TensorTable<math::kColumnsOf<Rule>, kStepChunk>;
using CounterTable = TensorTable<1, 1>;  // step counters, which may be null

// A number in device memory, float or double; if `data` is null, the number in `value`.
struct StepScalar {
  const void* data;
  bool is_double;
  double value;

  __device__ double get() const {
    if (data == nullptr) return value;
    return is_double ? *static_cast<const double*>(data) : *static_cast<const float*>(data);
  }
};

// The arguments of a step besides its tensors and options. fused_step_prepare_kernel reads and
// writes their device memory, so the host does not wait for its values.
struct StepSignals {
  const float* found_inf;   // the step is skipped unless this is 0; may be null
  const float* grad_scale;  // gradients are divided by it; may be null
  StepScalar total_norm;    // norm of the gradients before unscaling
  bool clip;                // true if total_norm is given: gradients are clipped to max_norm
  double max_norm;
  float* grad_norm;  // receives the norm of the unscaled gradients; may be null
  StepScalar lr;
};

template <typename Rule, typename acc_t>
struct StepPlan {
  acc_t* grad_factor;
  bool* skip;
  typename Rule::template Step<acc_t>* steps;
};

template <typename Rule, typename acc_t>
__global__ void __launch_bounds__(kThreads, kBlocksPerMultiprocessor)
    fused_step_prepare_kernel(const __grid_constant__ CounterTable table, int64_t first,
                              typename Rule::Options options, StepSignals signals,
                              StepPlan<Rule, acc_t> plan) {
  const float scale = signals.grad_scale == nullptr ? 1 : *signals.grad_scale;
  const bool skip = math::skips_step(signals.found_inf == nullptr ? 0 : *signals.found_inf, scale);
  if (blockIdx.x == 0 && threadIdx.x == 0) {
    const double norm = signals.clip ? signals.total_norm.get() : 0;
    const math::StepGradients gradients =
        math::step_gradients(scale, signals.clip, norm, signals.max_norm);
    *plan.grad_factor = static_cast<acc_t>(gradients.factor);
    *plan.skip = skip;
    if (signals.grad_norm != nullptr) *signals.grad_norm = static_cast<float>(gradients.norm);
  }
  if (skip) return;
  const double lr = signals.lr.get();
  for (int t = blockIdx.x * kThreads + threadIdx.x; t < table.count; t += gridDim.x * kThreads) {
    float* const counter = static_cast<float*>(table.data[0][t]);
    float count = 1;  // without a counter the step does not depend on it
    if (counter != nullptr) *counter = count = *counter + 1;
    plan.steps[first + t] = Rule::template step<acc_t>(options, lr, count);
  }
}

// The types of the columns of one kernel. With remainders, param_t is uint16_t, the bits of a
// bfloat16.
template <typename Rule, typename param_type, typename grad_type, typename state_type,
          Master kMasterKind, int kMomentCount>
struct StepTypes {
  using rule = Rule;
  using param_t = param_type;
  using grad_t = grad_type;
  using state_t = state_type;
  using acc_t = std::conditional_t<std::is_same_v<param_t, double>, double, float>;
  static constexpr Master kMaster = kMasterKind;
  static constexpr int kMoments = kMomentCount;
  using master_t =  // unused without a master
      std::conditional_t<kMaster == Master::kFloat, float,
                         std::conditional_t<kMaster == Master::kRemainder, int16_t, param_t>>;

  // Elements that a lane takes at a time: 4 (16 bytes of fp32, 8 of 16-bit types), 2 with three
  // moments, 1 of double. With more, a thread would need more than the 64 registers that it has
  // with four blocks per multiprocessor.
  static constexpr int kPackSize = std::is_same_v<acc_t, double> ? 1 : kMoments == 3 ? 2 : 4;

  // Doubles with three moments need a few registers more than that, so one block less is resident.
  static constexpr int kResidentBlocks =
      kBlocksPerMultiprocessor - (std::is_same_v<acc_t, double> && kMoments == 3 ? 1 : 0);
};

template <typename Types>
struct StepChunk {
  typename Types::param_t* param;
  typename Types::grad_t* grad;
  typename Types::master_t* master = nullptr;  // with masters
  typename Types::state_t* moments[Types::kMoments > 0 ? Types::kMoments : 1] = {};
};

template <typename Types>
__device__ __forceinline__ StepChunk<Types> step_chunk(const StepTable<typename Types::rule>& table,
                                                       const TableChunk& at) {
  StepChunk<Types> chunk = {chunk_data<typename Types::param_t>(table, math::kParam, at),
                            chunk_data<typename Types::grad_t>(table, math::kGrad, at)};
  if constexpr (Types::kMaster != Master::kNone) {
    chunk.master = chunk_data<typename Types::master_t>(table, math::kMaster, at);
  }
#pragma unroll
  for (int m = 0; m < Types::kMoments; ++m) {
    chunk.moments[m] = chunk_data<typename Types::state_t>(table, math::kFirstMoment + m, at);
  }
  return chunk;
}

// Compares one element in 128, and the last element of the chunk, with their masters. This reads 32
// bytes per 128 elements. If one of them was overwritten, the whole chunk is searched, and each
// overwritten element's master adopts the new value. A write of 128 adjacent elements covers a
// compared element in every chunk that it touches: the last element of the chunk in which it
// begins, the first element of the chunk in which it ends, or, if it lies within one chunk, an
// element at a multiple of 128. It is not noticed in a chunk whose compared elements already had
// the values written.
template <typename Types>
__device__ __forceinline__ void adopt_params(const StepChunk<Types>& chunk, int size, int lane) {
  constexpr int kStride = 128;
  static_assert(kWarp * kStride > kStepChunk,
                "the other compared elements leave a lane for the chunk's last one");
  const int i = min(lane * kStride, size - 1);
  const bool is_written_over = size > 0 && math::is_written_over(chunk.param[i], chunk.master[i]);
  const bool are_any = __any_sync(0xffffffffu, is_written_over);
  __syncwarp();  // all lanes have read their elements, whose masters other lanes write below
  if (!are_any) return;
  for (int e = lane; e < size; e += kWarp) {
    chunk.master[e] = math::adopted(chunk.param[e], chunk.master[e]);
  }
  __syncwarp();  // other lanes step these elements
}

// Updates `kCount` elements starting at index `i`, with one load and one store per column.
template <int kCount, typename Types>
__device__ __forceinline__ void update_pack(
    const StepChunk<Types>& chunk, int i, typename Types::acc_t grad_factor,
    const math::StepOptions& options,
    const typename Types::rule::template Constants<typename Types::acc_t>& constants,
    const typename Types::rule::template Step<typename Types::acc_t>& step) {
  using acc_t = typename Types::acc_t;
  using param_t = typename Types::param_t;
  using grad_t = typename Types::grad_t;
  using state_t = typename Types::state_t;
  constexpr Master kMasterKind = Types::kMaster;
  constexpr int kMoments = Types::kMoments;

  auto grad = load_pack<kCount>(chunk.grad + i);
  Pack<state_t, kCount> moments[kMoments > 0 ? kMoments : 1] = {};
#pragma unroll
  for (int m = 0; m < kMoments; ++m) moments[m] = load_pack<kCount>(chunk.moments[m] + i);
  Pack<param_t, kCount> param = {};
  if constexpr (kMasterKind != Master::kFloat) param = load_pack<kCount>(chunk.param + i);
  Pack<typename Types::master_t, kCount> master = {};
  if constexpr (kMasterKind != Master::kNone) master = load_pack<kCount>(chunk.master + i);

#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    math::StepElement<acc_t, kMoments> x;
    if constexpr (kMasterKind == Master::kNone) x.param = static_cast<acc_t>(param.value[e]);
    if constexpr (kMasterKind == Master::kFloat) x.param = master.value[e];
    if constexpr (kMasterKind == Master::kRemainder) {
      x.param = math::join_float({param.value[e], master.value[e]});
    }
#pragma unroll
    for (int m = 0; m < kMoments; ++m) x.moments[m] = static_cast<acc_t>(moments[m].value[e]);
    const acc_t unscaled =
        math::Lane<acc_t>::product(static_cast<acc_t>(grad.value[e]), grad_factor);
    grad.value[e] = static_cast<grad_t>(unscaled);

    x = Types::rule::template update<kMoments>(x, options.maximize ? -unscaled : unscaled,
                                               constants, step);

#pragma unroll
    for (int m = 0; m < kMoments; ++m) moments[m].value[e] = static_cast<state_t>(x.moments[m]);
    if constexpr (kMasterKind == Master::kFloat) master.value[e] = x.param;
    if constexpr (kMasterKind == Master::kRemainder) {
      const math::SplitFloat split = math::split_float(x.param);
      param.value[e] = split.bfloat16;
      master.value[e] = split.remainder;
    } else {
      param.value[e] = static_cast<param_t>(x.param);
    }
  }

  store_pack(chunk.param + i, param);
#pragma unroll
  for (int m = 0; m < kMoments; ++m) store_pack(chunk.moments[m] + i, moments[m]);
  if (options.write_back_grads) store_pack(chunk.grad + i, grad);
  if constexpr (kMasterKind != Master::kNone) store_pack(chunk.master + i, master);
}

// Returns true if every column of the chunk is aligned for packs of kPackSize elements. A missing
// column is a null pointer, which counts as aligned.
template <typename Types>
__device__ __forceinline__ bool step_chunk_is_aligned(const StepChunk<Types>& chunk) {
  const auto past = [](const auto* data) { return elements_past_boundary<Types::kPackSize>(data); };
  auto all_past = past(chunk.param) | past(chunk.grad) | past(chunk.master);
#pragma unroll
  for (int m = 0; m < Types::kMoments; ++m) all_past |= past(chunk.moments[m]);
  return all_past == 0;
}

// `first` is the index in plan.steps of the first tensor of this launch.
template <typename Types>
__global__ void __launch_bounds__(kThreads, Types::kResidentBlocks)
    fused_step_kernel(const __grid_constant__ StepTable<typename Types::rule> table, int64_t first,
                      StepPlan<typename Types::rule, typename Types::acc_t> plan,
                      math::StepOptions options,
                      typename Types::rule::template Constants<typename Types::acc_t> constants) {
  if (*plan.skip) return;
  const auto grad_factor = *plan.grad_factor;
  for_each_chunk(table, [&](uint32_t, const TableChunk& at, int lane) {
    const StepChunk<Types> chunk = step_chunk<Types>(table, at);
    const auto step = plan.steps[first + at.tensor];
    if constexpr (Types::kMaster == Master::kFloat) {
      if (options.adopt_params) adopt_params(chunk, at.size, lane);
    }
    int done = 0;
    if (step_chunk_is_aligned(chunk)) {
      done = at.size / Types::kPackSize * Types::kPackSize;
#pragma unroll 1
      for (int i = lane * Types::kPackSize; i < done; i += kWarp * Types::kPackSize) {
        update_pack<Types::kPackSize>(chunk, i, grad_factor, options, constants, step);
      }
    }
#pragma unroll 1
    for (int i = done + lane; i < at.size; i += kWarp) {
      update_pack<1>(chunk, i, grad_factor, options, constants, step);
    }
  });
}

}  // namespace ampfuse
