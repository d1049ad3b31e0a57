// The columns of a chunk of a tensor, as one kernel of a fused step sees them.
#pragma once

#include <c10/util/BFloat16.h>
#include <c10/util/Half.h>

#include <type_traits>

#include "fused_step_plan.cuh"
#include "vectorized.cuh"

namespace ampfuse {

// In place of the type of gradients, this makes a step extended.
struct AnyType {};

// The types of the columns of one kernel. With remainders, param_t is uint16_t, the bits of a
// bfloat16. With moments in 8 bits, state_t is int8_t; the second moment is uint8_t.
//
// Steps with moments in 8 bits, with averages or with random rounding are extended. Their kernels
// need more registers, and are compiled once for all types of gradients and averages.
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
  static constexpr bool kIsExtended = std::is_same_v<grad_t, AnyType>;
  static constexpr bool kIsCoded = std::is_same_v<state_t, int8_t>;
  static_assert(!kIsCoded || (kIsExtended && kMoments <= math::kMostCodedMoments));
  // True if parameters may be rounded at random.
  static constexpr bool kMayRound = kIsExtended && kMaster == Master::kNone && sizeof(param_t) == 2;
  using master_t =  // unused without a master
      std::conditional_t<kMaster == Master::kFloat, float,
                         std::conditional_t<kMaster == Master::kRemainder, int16_t, param_t>>;

  // Elements that a lane takes at a time: 4 (16 bytes of fp32, 8 of 16-bit types), 2 with three
  // moments, 1 of double. With more, a thread would need more than the 64 registers that it has
  // with four blocks per multiprocessor.
  static constexpr int kPackSize = std::is_same_v<acc_t, double> ? 1 : kMoments == 3 ? 2 : 4;

  // Extended steps, and doubles with three moments, need a few registers more than that, so one
  // block less is resident.
  static constexpr int kResidentBlocks =
      kBlocksPerMultiprocessor -
      (kIsExtended || (std::is_same_v<acc_t, double> && kMoments == 3) ? 1 : 0);
};

template <typename Types>
struct StepChunk {
  using Table = StepTable<typename Types::rule>;
  typename Types::param_t* param;
  typename Types::grad_t* grad;                // unless the step is extended
  typename Types::master_t* master = nullptr;  // with masters
  typename Types::state_t* moments[Types::kMoments > 0 ? Types::kMoments : 1] = {};

  // Extended steps read the other pointers from the table when they use them: each would take two
  // registers for the whole chunk.
  const Table* table = nullptr;
  TableChunk at = {};

  template <typename T>
  __device__ __forceinline__ T* column(int column) const {
    return chunk_data<T>(*table, column, at);
  }

  // Returns the units of a moment in 8 bits.
  __device__ __forceinline__ uint16_t* units(int moment) const {
    return static_cast<uint16_t*>(table->at(math::kFirstUnit + moment, at.tensor)) +
           at.number * (kStepChunk / math::kCodeGroup);
  }
};

template <typename Types>
__device__ __forceinline__ StepChunk<Types> step_chunk(const StepTable<typename Types::rule>& table,
                                                       const TableChunk& at) {
  StepChunk<Types> chunk = {chunk_data<typename Types::param_t>(table, math::kParam, at), nullptr};
  if constexpr (!Types::kIsExtended) {
    chunk.grad = chunk_data<typename Types::grad_t>(table, math::kGrad, at);
  }
  if constexpr (Types::kMaster != Master::kNone) {
    chunk.master = chunk_data<typename Types::master_t>(table, math::kMaster, at);
  }
#pragma unroll
  for (int m = 0; m < Types::kMoments; ++m) {
    chunk.moments[m] = chunk_data<typename Types::state_t>(table, math::kFirstMoment + m, at);
  }
  chunk.table = &table;
  chunk.at = at;
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

// The arguments of a step of a chunk besides its tensors.
template <typename Types>
struct ChunkArguments {
  using rule = typename Types::rule;
  using acc_t = typename Types::acc_t;
  acc_t grad_factor;
  const math::StepOptions& options;
  const ExtendedTypes& types;
  const typename rule::template Constants<acc_t>& constants;
  const math::TensorStep<typename rule::template Step<acc_t>>& step;
};

// Calls visit(pointer) with a column of the chunk in its type.
template <typename Types, typename Visit>
__device__ __forceinline__ void visit_column(const StepChunk<Types>& chunk, int column,
                                             NumberType type, const Visit& visit) {
  using acc_t = typename Types::acc_t;
  if constexpr (std::is_same_v<acc_t, double>) {
    visit(chunk.template column<double>(column));
  } else {
    if (type == NumberType::kHalf) return visit(chunk.template column<c10::Half>(column));
    if (type == NumberType::kBFloat16) return visit(chunk.template column<c10::BFloat16>(column));
    visit(chunk.template column<float>(column));
  }
}

// Returns true if every column of the chunk is aligned for packs of kPackSize elements. A missing
// column is a null pointer, which counts as aligned.
template <typename Types>
__device__ __forceinline__ bool step_chunk_is_aligned(const StepChunk<Types>& chunk,
                                                      const ExtendedTypes& types) {
  const auto past = [](const auto* data) { return elements_past_boundary<Types::kPackSize>(data); };
  auto all_past = past(chunk.param) | past(chunk.master);
#pragma unroll
  for (int m = 0; m < Types::kMoments; ++m) all_past |= past(chunk.moments[m]);
  if constexpr (Types::kIsExtended) {
    const auto add_past = [&](const auto* data) { all_past |= past(data); };
    visit_column(chunk, math::kGrad, types.grad, add_past);
    if (types.ema != NumberType::kNone) visit_column(chunk, math::kEma, types.ema, add_past);
  } else {
    all_past |= past(chunk.grad);
  }
  return all_past == 0;
}

}  // namespace ampfuse
