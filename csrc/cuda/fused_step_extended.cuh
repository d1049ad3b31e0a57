// The parts of a step that only extended ones have: random rounding and exponential averages.
#pragma once

#include "../math/stochastic_rounding.h"
#include "fused_step_packs.cuh"

namespace ampfuse {

// Draws the random numbers of `kCount` consecutive elements; `first` is the index of the first.
template <int kCount>
__device__ __forceinline__ void draw_randoms(uint64_t seed, uint32_t step, int64_t first,
                                             uint32_t (&randoms)[kCount]) {
  constexpr int kPer = math::kElementsPerCounter;
  const int past = static_cast<int>(first % kPer);
  const auto words = math::step_random_words(seed, first / kPer, step);
  auto next = words;
  // Only shards of tensors have packs that are split over two counters.
  if (past + kCount > kPer) next = math::step_random_words(seed, first / kPer + 1, step);
#pragma unroll
  for (int e = 0; e < kCount; ++e) {
    randoms[e] = past + e < kPer ? math::random_of_element(words, past + e)
                                 : math::random_of_element(next, past + e - kPer);
  }
}

template <typename Types>
__device__ __forceinline__ float rounded_at_random(float x, uint32_t random) {
  return std::is_same_v<typename Types::param_t, c10::Half>
             ? math::rounded_to_half(x, math::random_of_param(random))
             : math::rounded_to_bfloat16(x, math::random_of_param(random));
}

// Updates the averages of the numbers that number(e) returns.
template <int kCount, typename Types, typename Packs, typename Number>
__device__ __forceinline__ void update_averages(const StepChunk<Types>& chunk, int i,
                                                const Packs& packs,
                                                const ChunkArguments<Types>& arguments,
                                                const uint32_t (&randoms)[kCount],
                                                const Number& number) {
  using acc_t = typename Types::acc_t;
  const auto weight = static_cast<acc_t>(arguments.options.ema_weight);
  visit_column(chunk, math::kEma, arguments.types.ema, [&]<typename ema_t>(ema_t* averages) {
    auto pack = packs.template load<kCount>(averages + i);
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      acc_t x = math::averaged(static_cast<acc_t>(pack.value[e]), number(e), weight,
                               arguments.step.count);
      if constexpr (std::is_same_v<ema_t, c10::BFloat16>) {
        x = math::rounded_to_bfloat16(x, math::random_of_ema(randoms[e]));
      }
      pack.value[e] = static_cast<ema_t>(x);
    }
    packs.store(averages + i, pack);
  });
}

// Finishes an extended step of `kCount` elements starting at index `i`. Their new numbers are in
// the pack, or in `stepped` if they may be rounded at random.
template <int kCount, typename Types, typename Packs>
__device__ __forceinline__ void finish_extended(const StepChunk<Types>& chunk, int i,
                                                const Packs& packs,
                                                const ChunkArguments<Types>& arguments,
                                                StepPack<kCount, Types>& pack,
                                                const typename Types::acc_t (&stepped)[kCount],
                                                const uint32_t (&randoms)[kCount]) {
  if (arguments.types.ema != NumberType::kNone) {
    update_averages(chunk, i, packs, arguments, randoms, [&](int e) {
      if constexpr (Types::kMayRound) {
        return stepped[e];
      } else {
        return pack.number(e);
      }
    });
  }
  if constexpr (Types::kMayRound) {
    const bool at_random = arguments.options.round_at_random;
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      pack.set_number(e, at_random ? rounded_at_random<Types>(stepped[e], randoms[e]) : stepped[e]);
    }
  }
}

}  // namespace ampfuse
