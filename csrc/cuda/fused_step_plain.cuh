// The step of a chunk whose moments are numbers.
#pragma once

#include "fused_step_extended.cuh"

namespace ampfuse {

// Updates `kCount` elements starting at index `i`, with one load and one store per column. `index`
// is the first one's index among all elements of the model.
template <int kCount, typename Types>
__device__ __forceinline__ void update_pack(const StepChunk<Types>& chunk, int i, int64_t index,
                                            const ChunkArguments<Types>& arguments) {
  using acc_t = typename Types::acc_t;
  using state_t = typename Types::state_t;
  constexpr int kMoments = Types::kMoments;
  constexpr WholePacks packs;

  StepPack<kCount, Types> pack;
  pack.load(chunk, i, packs, arguments.types);
  Pack<state_t, kCount> moments[kMoments > 0 ? kMoments : 1] = {};
#pragma unroll
  for (int m = 0; m < kMoments; ++m) moments[m] = load_pack<kCount>(chunk.moments[m] + i);

  acc_t stepped[kCount] = {};
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    math::StepElement<acc_t, kMoments> x;
    x.param = pack.number(e);
#pragma unroll
    for (int m = 0; m < kMoments; ++m) x.moments[m] = static_cast<acc_t>(moments[m].value[e]);
    x = Types::rule::template update<kMoments>(x, pack.unscaled_grad(e, arguments),
                                               arguments.constants, arguments.step.of_rule);
#pragma unroll
    for (int m = 0; m < kMoments; ++m) moments[m].value[e] = static_cast<state_t>(x.moments[m]);
    stepped[e] = x.param;
    pack.set_number(e, x.param);
  }

#pragma unroll
  for (int m = 0; m < kMoments; ++m) store_pack(chunk.moments[m] + i, moments[m]);
  if constexpr (Types::kIsExtended) {
    uint32_t randoms[kCount];
    draw_randoms(arguments.options.seed, arguments.step.count, index, randoms);
    finish_extended(chunk, i, packs, arguments, pack, stepped, randoms);
  }
  pack.store(chunk, i, packs, arguments);
}

template <typename Types>
__device__ __forceinline__ void step_elements(const StepChunk<Types>& chunk, int size, int lane,
                                              int64_t index,
                                              const ChunkArguments<Types>& arguments) {
  constexpr int kPackSize = Types::kPackSize;
  int done = 0;
  if (step_chunk_is_aligned(chunk, arguments.types)) {
    done = size / kPackSize * kPackSize;
#pragma unroll 1
    for (int i = lane * kPackSize; i < done; i += kWarp * kPackSize) {
      update_pack<kPackSize>(chunk, i, index + i, arguments);
    }
  }
#pragma unroll 1
  for (int i = done + lane; i < size; i += kWarp) update_pack<1>(chunk, i, index + i, arguments);
}

}  // namespace ampfuse
