// The step of a chunk whose moments are in 8 bits (math/coded_moment.h).
//
// A lane takes a pack of 4 elements, so the 8 lanes of a group find its largest root by three
// exchanges. All lanes of a warp take part, also those beyond the end of the chunk.
#pragma once

#include "fused_step_extended.cuh"

namespace ampfuse {

template <int kMoment>
using code_t = std::conditional_t<kMoment == 0, int8_t, uint8_t>;

// The codes of one moment of a pack.
template <int kMoment, typename Types>
struct CodedPack {
  static constexpr int kCount = Types::kPackSize;
  static constexpr int kLanes = math::kCodeGroup / kCount;  // of a group
  float roots[kCount];

  static __device__ __forceinline__ code_t<kMoment>* codes(const StepChunk<Types>& chunk, int i) {
    return reinterpret_cast<code_t<kMoment>*>(chunk.moments[kMoment]) + i;
  }

  // Sets `moments` to the decoded moments.
  static __device__ __forceinline__ void load(const StepChunk<Types>& chunk, int i,
                                              const PartialPacks& packs, float (&moments)[kCount]) {
    const uint16_t bits = packs.count > 0 ? chunk.units(kMoment)[i / math::kCodeGroup] : 0;
    const float unit = __builtin_bit_cast(float, static_cast<uint32_t>(bits) << 16);
    const auto pack = packs.template load<kCount>(codes(chunk, i));
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      moments[e] = math::decode_moment(static_cast<float>(pack.value[e]), unit);
    }
  }

  // Elements that do not exist have the root 0.
  __device__ __forceinline__ void set(int e, float moment, bool exists) {
    const float root = kMoment == 0 ? math::signed_root(moment) : std::sqrt(moment);
    roots[e] = exists ? root : 0;
  }

  __device__ __forceinline__ void store(const StepChunk<Types>& chunk, int i,
                                        const PartialPacks& packs,
                                        const uint32_t (&randoms)[kCount]) const {
    uint32_t largest = 0;
#pragma unroll
    for (int e = 0; e < kCount; ++e) largest = max(largest, math::magnitude_bits(roots[e]));
#pragma unroll
    for (int lanes = kLanes / 2; lanes > 0; lanes /= 2) {
      largest = max(largest, __shfl_xor_sync(0xffffffffu, largest, lanes));
    }
    const float unit = math::code_unit<code_t<kMoment>>(largest);
    const float factor = math::code_factor(unit);
    Pack<code_t<kMoment>, kCount> pack;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      pack.value[e] = math::encode_root<code_t<kMoment>>(
          roots[e], factor, math::random_of_moment(randoms[e], kMoment));
    }
    packs.store(codes(chunk, i), pack);
    __syncwarp();  // all lanes have read the unit that one of them writes
    if (i % math::kCodeGroup == 0 && packs.count > 0) {
      chunk.units(kMoment)[i / math::kCodeGroup] =
          static_cast<uint16_t>(__builtin_bit_cast(uint32_t, unit) >> 16);
    }
  }
};

// Updates the elements of a pack that exist. All lanes of a warp must call it.
template <typename Types>
__device__ __forceinline__ void update_coded_pack(const StepChunk<Types>& chunk, int i,
                                                  const PartialPacks& packs, int64_t index,
                                                  const ChunkArguments<Types>& arguments) {
  constexpr int kCount = Types::kPackSize;
  constexpr int kMoments = Types::kMoments;
  StepPack<kCount, Types> pack;
  pack.load(chunk, i, packs, arguments.types);
  float moments[math::kMostCodedMoments][kCount] = {};
  CodedPack<0, Types> first;
  CodedPack<1, Types> second;
  first.load(chunk, i, packs, moments[0]);
  if constexpr (kMoments > 1) second.load(chunk, i, packs, moments[1]);
  uint32_t randoms[kCount];
  draw_randoms(arguments.options.seed, arguments.step.count, index, randoms);
  float stepped[kCount] = {};
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    math::StepElement<float, kMoments> x;
    x.param = pack.number(e);
#pragma unroll
    for (int m = 0; m < kMoments; ++m) x.moments[m] = moments[m][e];
    x = Types::rule::template update<kMoments>(x, pack.unscaled_grad(e, arguments),
                                               arguments.constants, arguments.step.of_rule);
    first.set(e, x.moments[0], e < packs.count);
    if constexpr (kMoments > 1) second.set(e, x.moments[1], e < packs.count);
    stepped[e] = x.param;
    pack.set_number(e, x.param);
  }
  first.store(chunk, i, packs, randoms);
  if constexpr (kMoments > 1) second.store(chunk, i, packs, randoms);
  finish_extended(chunk, i, packs, arguments, pack, stepped, randoms);
  pack.store(chunk, i, packs, arguments);
}

template <typename Types>
__device__ __forceinline__ void step_coded_elements(const StepChunk<Types>& chunk, int size,
                                                    int lane, int64_t index,
                                                    const ChunkArguments<Types>& arguments) {
  constexpr int kCount = Types::kPackSize;
  const bool are_aligned = step_chunk_is_aligned(chunk, arguments.types);
#pragma unroll 1
  for (int of_warp = 0; of_warp < size; of_warp += kWarp * kCount) {
    const int i = of_warp + lane * kCount;
    const int count = min(kCount, max(0, size - i));
    update_coded_pack(chunk, i, {are_aligned, count}, index + i, arguments);
  }
}

}  // namespace ampfuse
