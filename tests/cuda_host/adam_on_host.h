// Runs the two kernels of fused_adam on fake tensors, as cuda/fused_adam.cu does on real ones.
// adam_kernels.cpp compiles the kernels for all tests.
#pragma once

#include "simt/simt.h"

#include "cuda/fused_adam.cuh"

#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "numbers.h"

using ampfuse::AdamSignals;
using ampfuse::Master;
using ampfuse::math::AdamOptions;
using enum ampfuse::math::AdamColumn;

// The distance from a 16-byte boundary to the start of each column, in elements.
using AdamOffsets = std::array<int64_t, kAdamColumns>;

// The types of the columns of a kernel.
struct AdamKind {
  Type param;
  Type grad;
  Type state;
  Master master;
  bool amsgrad;

  bool operator==(const AdamKind&) const = default;
};

// Every type is in every column at least once, with and without amsgrad.
inline constexpr AdamKind kFloats = {kFloat, kFloat, kFloat, Master::kNone, false};
inline constexpr AdamKind kFloatsWithAmsgrad = {kFloat, kHalf, kFloat, Master::kNone, true};
inline constexpr AdamKind kHalfAlone = {kHalf, kHalf, kFloat, Master::kNone, false};
inline constexpr AdamKind kBFloat16Alone = {kBFloat16, kFloat, kBFloat16, Master::kNone, true};
inline constexpr AdamKind kBFloat16WithMaster = {kBFloat16, kHalf, kFloat, Master::kFloat, false};
inline constexpr AdamKind kHalfWithMaster = {kHalf, kBFloat16, kFloat, Master::kFloat, true};
inline constexpr AdamKind kNarrowWithRemainder = {Type::kUpperHalf, kBFloat16, kBFloat16,
                                                  Master::kRemainder, false};
inline constexpr AdamKind kWithRemainder = {Type::kUpperHalf, kBFloat16, kFloat, Master::kRemainder,
                                            true};
inline constexpr AdamKind kDoubles = {kDouble, kDouble, kDouble, Master::kNone, true};
inline constexpr std::array kAdamKinds = {
    kFloats,         kFloatsWithAmsgrad,   kHalfAlone,     kBFloat16Alone, kBFloat16WithMaster,
    kHalfWithMaster, kNarrowWithRemainder, kWithRemainder, kDoubles};

template <AdamKind kKind>
using AdamTypesOf = ampfuse::AdamTypes<CppType<kKind.param>, CppType<kKind.grad>,
                                       CppType<kKind.state>, kKind.master, kKind.amsgrad>;

// A parameter with its gradient and state. Columns that its types do not need are empty.
struct FakeAdamTensor {
  AdamKind kind;
  int64_t size;
  float steps_taken;
  std::array<Numbers, kAdamColumns> columns;

  FakeAdamTensor(const AdamKind& kind, int64_t size, float steps_taken, const AdamOffsets& offsets)
      : kind(kind),
        size(size),
        steps_taken(steps_taken),
        columns{Numbers(kind.param, size, offsets[0]),
                Numbers(kind.grad, size, offsets[1]),
                Numbers(kind.state, size, offsets[2]),
                Numbers(kind.state, size, offsets[3]),
                Numbers(kind.state, kind.amsgrad ? size : 0, offsets[4]),
                Numbers(kind.master == Master::kRemainder ? Type::kRemainder : kFloat,
                        kind.master == Master::kNone ? 0 : size, offsets[5])} {}

  Numbers& operator[](int column) { return columns[column]; }
  const Numbers& operator[](int column) const { return columns[column]; }

  // Returns the number that is stepped; the parameter may be only a rounded copy of it.
  double number(int64_t i) const {
    const Numbers& param = columns[kParam];
    const Numbers& master = columns[kMaster];
    if (kind.master == Master::kNone) return param[i];
    if (kind.master == Master::kFloat) return master[i];
    return ampfuse::math::join_float({param.at<uint16_t>()[i], master.at<int16_t>()[i]});
  }

  void set_number(int64_t i, double x) {
    const ampfuse::math::SplitFloat split = ampfuse::math::split_float(static_cast<float>(x));
    const bool is_split = kind.master == Master::kRemainder;
    columns[kParam].set(i, is_split ? split.bfloat16 : x);
    if (kind.master == Master::kNone) return;
    columns[kMaster].set(i, is_split ? split.remainder : x);
  }
};

using FakeAdamTensors = std::vector<FakeAdamTensor>;

// Returns the bytes of everything that a launch may write.
inline std::string bits_of(const FakeAdamTensors& tensors) {
  std::string bits;
  for (const FakeAdamTensor& tensor : tensors) {
    bits += std::to_string(tensor.steps_taken);
    for (const Numbers& column : tensor.columns) bits += column.bits();
  }
  return bits;
}

// Returns a tensor as in the middle of training. Tensors with the same seed hold the same numbers,
// rounded to their types.
inline FakeAdamTensor random_adam_tensor(const AdamKind& kind, int64_t size, float steps_taken,
                                         const AdamOffsets& offsets, uint32_t seed) {
  FakeAdamTensor tensor(kind, size, steps_taken, offsets);
  tensor[kGrad].fill(random_values(size, seed));
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < size; ++i) {
    tensor.set_number(i, normal(generator));
    tensor[kExpAvg].set(i, normal(generator));
    tensor[kExpAvgSq].set(i, std::fabs(normal(generator)));
    // The maximum of v so far; the next v may exceed it.
    const double largest = std::fabs(normal(generator));
    if (kind.amsgrad) tensor[kMaxExpAvgSq].set(i, largest);
  }
  return tensor;
}

// Returns tensors with sizes on both sides of each unit of the kernel: a pack (1, 2 or 4 elements),
// a pack per lane (32, 64 or 128), a chunk (2048) and several chunks. Step counts differ between
// tensors.
inline FakeAdamTensors adam_boundary_tensors(const AdamKind& kind,
                                             const AdamOffsets& offsets = {}) {
  const int64_t sizes[] = {0,  1,  2,   3,   4,   5,    31,   32,   33,   63,
                           64, 65, 127, 128, 129, 2047, 2048, 2049, 8191, 8193};
  FakeAdamTensors tensors;
  uint32_t seed = 0;
  for (const int64_t size : sizes) {
    const auto steps_taken = static_cast<float>(seed * seed);
    tensors.push_back(random_adam_tensor(kind, size, steps_taken, offsets, seed++));
  }
  return tensors;
}

// The defaults of torch.optim.AdamW, except for weight_decay.
inline AdamOptions adamw_options() {
  return {.beta1 = 0.9,
          .beta2 = 0.999,
          .weight_decay = 0.1,
          .eps = 1e-8,
          .amsgrad = false,
          .maximize = false,
          .decoupled = true,
          .write_back_grads = false,
          .adopt_params = false};
}

// Signals of a step with a learning rate, but without skipping, unscaling or clipping.
inline AdamSignals signals_with(ampfuse::AdamScalar lr) {
  AdamSignals signals = {};
  signals.lr = lr;
  return signals;
}
inline AdamSignals signals_with_lr(double lr) {
  return signals_with({nullptr, true, lr});
}

// A plan whose fields are separate allocations; its numbers are NaN until a kernel writes them.
template <typename acc_t>
struct HostPlan {
  std::vector<ampfuse::math::AdamStep<acc_t>> steps;
  std::unique_ptr<acc_t> grad_factor = std::make_unique<acc_t>(NAN);
  std::unique_ptr<bool> skip = std::make_unique<bool>();

  explicit HostPlan(size_t tensors) : steps(tensors, {acc_t(NAN), acc_t(NAN), acc_t(NAN)}) {}

  ampfuse::AdamPlan<acc_t> plan() { return {grad_factor.get(), skip.get(), steps.data()}; }
};

// These functions return their number of launches. Tensors must be of one kind.

template <typename acc_t>
int prepare_on_host(const std::vector<float*>& counters, const AdamOptions& options,
                    const AdamSignals& signals, HostPlan<acc_t>& plan);

template <typename acc_t>
int update_on_host(const FakeAdamTensors& tensors, const AdamOptions& options, int64_t first,
                   HostPlan<acc_t>& plan);

int step_on_host(FakeAdamTensors& tensors, const AdamOptions& options, const AdamSignals& signals);
