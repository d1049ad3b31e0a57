// Loads, stores and unscales a few consecutive elements of a chunk, for all kinds of steps.
#pragma once

#include "../math/split_float.h"
#include "fused_step_chunk.cuh"

namespace ampfuse {

// Ways to load and store the packs of a column: whole ones, or packs of which only the first
// `count` elements exist. Elements of a chunk that is not aligned are accessed one by one.
struct WholePacks {
  template <int kCount, typename T>
  __device__ __forceinline__ Pack<T, kCount> load(const T* data) const {
    return load_pack<kCount>(data);
  }
  template <int kCount, typename T>
  __device__ __forceinline__ void store(T* data, const Pack<T, kCount>& pack) const {
    store_pack(data, pack);
  }
};

struct PartialPacks {
  bool are_aligned;
  int count;

  template <int kCount, typename T>
  __device__ __forceinline__ Pack<T, kCount> load(const T* data) const {
    if (are_aligned && count == kCount) return load_pack<kCount>(data);
    Pack<T, kCount> pack = {};
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      if (e < count) pack.value[e] = data[e];
    }
    return pack;
  }
  template <int kCount, typename T>
  __device__ __forceinline__ void store(T* data, const Pack<T, kCount>& pack) const {
    if (are_aligned && count == kCount) return store_pack(data, pack);
#pragma unroll
    for (int e = 0; e < kCount; ++e) {
      if (e < count) data[e] = pack.value[e];
    }
  }
};

// The gradients of consecutive elements.
template <int kCount, typename Types>
struct GradPack {
  using acc_t = typename Types::acc_t;
  Pack<typename Types::grad_t, kCount> pack;

  template <typename Packs>
  __device__ __forceinline__ void load(const StepChunk<Types>& chunk, int i, const Packs& packs,
                                       const ExtendedTypes&) {
    pack = packs.template load<kCount>(chunk.grad + i);
  }
  __device__ __forceinline__ acc_t get(int e) const { return static_cast<acc_t>(pack.value[e]); }
  __device__ __forceinline__ void set(int e, acc_t x) {
    pack.value[e] = static_cast<typename Types::grad_t>(x);
  }
  template <typename Packs>
  __device__ __forceinline__ void store(const StepChunk<Types>& chunk, int i, const Packs& packs,
                                        const ExtendedTypes&) const {
    packs.store(chunk.grad + i, pack);
  }
};

// The same for extended steps.
template <int kCount, typename Types>
  requires Types::kIsExtended
struct GradPack<kCount, Types> {
  using acc_t = typename Types::acc_t;
  acc_t value[kCount];

  template <typename Packs>
  __device__ __forceinline__ void load(const StepChunk<Types>& chunk, int i, const Packs& packs,
                                       const ExtendedTypes& types) {
    visit_column(chunk, math::kGrad, types.grad, [&](const auto* data) {
      const auto loaded = packs.template load<kCount>(data + i);
#pragma unroll
      for (int e = 0; e < kCount; ++e) value[e] = static_cast<acc_t>(loaded.value[e]);
    });
  }
  __device__ __forceinline__ acc_t get(int e) const { return value[e]; }
  __device__ __forceinline__ void set(int e, acc_t x) { value[e] = x; }
  template <typename Packs>
  __device__ __forceinline__ void store(const StepChunk<Types>& chunk, int i, const Packs& packs,
                                        const ExtendedTypes& types) const {
    visit_column(chunk, math::kGrad, types.grad, [&]<typename T>(T* data) {
      Pack<T, kCount> pack;
#pragma unroll
      for (int e = 0; e < kCount; ++e) pack.value[e] = static_cast<T>(value[e]);
      packs.store(data + i, pack);
    });
  }
};

// Parameters, gradients and masters of consecutive elements.
template <int kCount, typename Types>
struct StepPack {
  using acc_t = typename Types::acc_t;
  GradPack<kCount, Types> grad;
  Pack<typename Types::param_t, kCount> param = {};
  Pack<typename Types::master_t, kCount> master = {};

  // Loads what the step reads.
  template <typename Packs>
  __device__ __forceinline__ void load(const StepChunk<Types>& chunk, int i, const Packs& packs,
                                       const ExtendedTypes& types) {
    grad.load(chunk, i, packs, types);
    if constexpr (Types::kMaster != Master::kFloat) {
      param = packs.template load<kCount>(chunk.param + i);
    }
    if constexpr (Types::kMaster != Master::kNone) {
      master = packs.template load<kCount>(chunk.master + i);
    }
  }

  template <typename Packs>
  __device__ __forceinline__ void store(const StepChunk<Types>& chunk, int i, const Packs& packs,
                                        const ChunkArguments<Types>& arguments) const {
    packs.store(chunk.param + i, param);
    if (arguments.options.write_back_grads) grad.store(chunk, i, packs, arguments.types);
    if constexpr (Types::kMaster != Master::kNone) packs.store(chunk.master + i, master);
  }

  // Returns the number that is stepped.
  __device__ __forceinline__ acc_t number(int e) const {
    if constexpr (Types::kMaster == Master::kNone) return static_cast<acc_t>(param.value[e]);
    if constexpr (Types::kMaster == Master::kFloat) return master.value[e];
    if constexpr (Types::kMaster == Master::kRemainder) {
      return math::join_float({param.value[e], master.value[e]});
    }
  }

  __device__ __forceinline__ void set_number(int e, acc_t x) {
    if constexpr (Types::kMaster == Master::kRemainder) {
      const math::SplitFloat split = math::split_float(x);
      param.value[e] = split.bfloat16;
      master.value[e] = split.remainder;
    } else {
      param.value[e] = static_cast<typename Types::param_t>(x);
      if constexpr (Types::kMaster == Master::kFloat) master.value[e] = x;
    }
  }

  // Returns the unscaled gradient, which takes the place of the scaled one.
  __device__ __forceinline__ acc_t unscaled_grad(int e, const ChunkArguments<Types>& arguments) {
    const acc_t unscaled = math::Lane<acc_t>::product(grad.get(e), arguments.grad_factor);
    grad.set(e, unscaled);
    return arguments.options.maximize ? -unscaled : unscaled;
  }
};

}  // namespace ampfuse
