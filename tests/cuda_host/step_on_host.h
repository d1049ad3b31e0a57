// Runs the two kernels of a fused optimizer on fake tensors, as cuda/fused_step_launch.cuh does on
// real ones. step_kernels.cpp compiles the kernels for all tests.
#pragma once

#include "simt/simt.h"

#include "cuda/fused_step.cuh"
#include "math/fused_adam.h"
#include "math/fused_sgd.h"

#include <algorithm>
#include <array>
#include <cmath>
#include <limits>
#include <memory>
#include <string>
#include <vector>

#include "numbers.h"

using ampfuse::Master;
using ampfuse::NumberType;
using ampfuse::StepSignals;
using ampfuse::math::AdamRule;
using ampfuse::math::kMostColumns;
using ampfuse::math::SgdRule;
using enum ampfuse::math::StepColumn;
using enum ampfuse::math::AdamColumn;
using enum ampfuse::math::SgdColumn;

// All options of a step.
template <typename Rule>
struct HostOptions : Rule::Options {
  ampfuse::math::StepOptions step = {};
};
using AdamStepOptions = HostOptions<AdamRule>;
using SgdStepOptions = HostOptions<SgdRule>;

// The distance from a 16-byte boundary to the start of each column, in elements.
using StepOffsets = std::array<int64_t, kMostColumns>;

// The types of the columns of a kernel, and the number of its moments.
struct StepKind {
  Type param;
  Type grad;
  Type state;
  Master master;
  int moments;
  NumberType ema = NumberType::kNone;

  bool rounds_at_random = false;

  constexpr bool is_coded() const { return state == Type::kCode; }
  constexpr bool is_extended() const {
    return is_coded() || rounds_at_random || ema != NumberType::kNone;
  }

  bool operator==(const StepKind&) const = default;
};

// Every type is in every column at least once, with two moments and with the third one of amsgrad.
inline constexpr StepKind kFloats = {kFloat, kFloat, kFloat, Master::kNone, 2};
inline constexpr StepKind kFloatsWithAmsgrad = {kFloat, kHalf, kFloat, Master::kNone, 3};
inline constexpr StepKind kHalfAlone = {kHalf, kHalf, kFloat, Master::kNone, 2};
inline constexpr StepKind kBFloat16Alone = {kBFloat16, kFloat, kBFloat16, Master::kNone, 3};
inline constexpr StepKind kBFloat16WithMaster = {kBFloat16, kHalf, kFloat, Master::kFloat, 2};
inline constexpr StepKind kHalfWithMaster = {kHalf, kBFloat16, kFloat, Master::kFloat, 3};
inline constexpr StepKind kNarrowWithRemainder = {Type::kUpperHalf, kBFloat16, kBFloat16,
                                                  Master::kRemainder, 2};
inline constexpr StepKind kWithRemainder = {Type::kUpperHalf, kBFloat16, kFloat, Master::kRemainder,
                                            3};
inline constexpr StepKind kDoubles = {kDouble, kDouble, kDouble, Master::kNone, 3};
inline constexpr std::array kAdamKinds = {
    kFloats,         kFloatsWithAmsgrad,   kHalfAlone,     kBFloat16Alone, kBFloat16WithMaster,
    kHalfWithMaster, kNarrowWithRemainder, kWithRemainder, kDoubles};

// Kinds of extended steps.
inline constexpr StepKind kCodedFloats = {kFloat, kFloat, Type::kCode, Master::kNone, 2};
inline constexpr StepKind kCodedHalfAlone = {
    kHalf, kHalf, Type::kCode, Master::kNone, 2, NumberType::kWide, true};
inline constexpr StepKind kCodedBFloat16Alone = {
    kBFloat16, kBFloat16, Type::kCode, Master::kNone, 2, NumberType::kBFloat16, true};
inline constexpr StepKind kCodedWithMaster = {kBFloat16, kHalf, Type::kCode, Master::kFloat, 2};
inline constexpr StepKind kCodedWithRemainder = {Type::kUpperHalf,   kBFloat16, Type::kCode,
                                                 Master::kRemainder, 2,         NumberType::kWide};
inline constexpr StepKind kRoundedBFloat16 = {
    kBFloat16, kFloat, kBFloat16, Master::kNone, 3, NumberType::kNone, true};
inline constexpr StepKind kAveragedFloats = {kFloat,        kHalf, kFloat,
                                             Master::kNone, 2,     NumberType::kWide};
inline constexpr StepKind kAveragedDoubles = {kDouble,       kDouble, kDouble,
                                              Master::kNone, 2,       NumberType::kWide};
inline constexpr StepKind kAveragedWithRemainder = {
    Type::kUpperHalf, kBFloat16, kFloat, Master::kRemainder, 2, NumberType::kBFloat16};
inline constexpr std::array kExtendedAdamKinds = {
    kCodedFloats,     kCodedHalfAlone,     kCodedBFloat16Alone,
    kCodedWithMaster, kCodedWithRemainder, kRoundedBFloat16,
    kAveragedFloats,  kAveragedDoubles,    kAveragedWithRemainder};

// The same without momentum and with it.
inline constexpr StepKind kSgdFloats = {kFloat, kFloat, kFloat, Master::kNone, 1};
inline constexpr StepKind kSgdFloatsAlone = {kFloat, kBFloat16, kBFloat16, Master::kNone, 0};
inline constexpr StepKind kSgdHalfWithMaster = {kHalf, kHalf, kFloat, Master::kFloat, 1};
inline constexpr StepKind kSgdBFloat16WithMaster = {kBFloat16, kFloat, kFloat, Master::kFloat, 0};
inline constexpr StepKind kSgdWithRemainder = {Type::kUpperHalf, kBFloat16, kBFloat16,
                                               Master::kRemainder, 1};
inline constexpr StepKind kSgdDoubles = {kDouble, kDouble, kDouble, Master::kNone, 1};
inline constexpr std::array kSgdKinds = {kSgdFloats,         kSgdFloatsAlone,
                                         kSgdHalfWithMaster, kSgdBFloat16WithMaster,
                                         kSgdWithRemainder,  kSgdDoubles};

inline constexpr StepKind kSgdCoded = {Type::kUpperHalf, kBFloat16, Type::kCode, Master::kRemainder,
                                       1};
inline constexpr StepKind kSgdRounded = {kBFloat16, kBFloat16,         kFloat, Master::kNone,
                                         0,         NumberType::kNone, true};
inline constexpr std::array kExtendedSgdKinds = {kSgdCoded, kSgdRounded};

// All kinds for which kernels are compiled.
template <size_t a, size_t b>
constexpr std::array<StepKind, a + b> joined(const std::array<StepKind, a>& first,
                                             const std::array<StepKind, b>& second) {
  std::array<StepKind, a + b> all = {};
  std::copy(first.begin(), first.end(), all.begin());
  std::copy(second.begin(), second.end(), all.begin() + a);
  return all;
}
template <typename Rule>
inline constexpr auto kKindsOf = joined(kAdamKinds, kExtendedAdamKinds);
template <>
inline constexpr auto kKindsOf<SgdRule> = joined(kSgdKinds, kExtendedSgdKinds);

template <typename Rule, StepKind kKind>
using StepTypesOf = ampfuse::StepTypes<
    Rule, CppType<kKind.param>,
    std::conditional_t<kKind.is_extended(), ampfuse::AnyType, CppType<kKind.grad>>,
    CppType<kKind.state>, kKind.master, kKind.moments>;

inline NumberType number_type(Type type) {
  return type == kHalf       ? NumberType::kHalf
         : type == kBFloat16 ? NumberType::kBFloat16
                             : NumberType::kWide;
}

// A parameter with its gradient and state. Columns that its types do not need are empty.
struct FakeStepTensor {
  StepKind kind;
  int64_t size;
  float steps_taken;
  int64_t first_index = 0;  // of its first element among all elements of the model
  std::array<Numbers, kMostColumns> columns;

  FakeStepTensor(const StepKind& kind, int64_t size, float steps_taken, const StepOffsets& offsets)
      : kind(kind),
        size(size),
        steps_taken(steps_taken),
        columns{Numbers(kind.param, size, offsets[kParam]),
                Numbers(kind.grad, size, offsets[kGrad]),
                Numbers(kind.master == Master::kRemainder ? Type::kRemainder : kFloat,
                        kind.master == Master::kNone ? 0 : size, offsets[kMaster]),
                moment(0, offsets),
                moment(1, offsets),
                moment(2, offsets),
                units(0),
                units(1),
                Numbers(kind.ema == NumberType::kBFloat16 ? kBFloat16 : arithmetic_of(kind.param),
                        kind.ema == NumberType::kNone ? 0 : size, offsets[kEma])} {}

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

 private:
  Numbers moment(int m, const StepOffsets& offsets) const {
    const Type type = kind.is_coded() && m > 0 ? Type::kByte : kind.state;
    return Numbers(type, m < kind.moments ? size : 0, offsets[kFirstMoment + m]);
  }
  Numbers units(int m) const {
    const int64_t groups = (size + ampfuse::math::kCodeGroup - 1) / ampfuse::math::kCodeGroup;
    return Numbers(kBFloat16, kind.is_coded() && m < kind.moments ? groups : 0);
  }
};

using FakeStepTensors = std::vector<FakeStepTensor>;

// Returns the bytes of everything that a launch may write.
inline std::string bits_of(const FakeStepTensors& tensors) {
  std::string bits;
  for (const FakeStepTensor& tensor : tensors) {
    bits += std::to_string(tensor.steps_taken);
    for (const Numbers& column : tensor.columns) bits += column.bits();
  }
  return bits;
}

// Returns a tensor as in the middle of training. Tensors with the same seed hold the same numbers,
// rounded to their types.
inline FakeStepTensor random_step_tensor(const StepKind& kind, int64_t size, float steps_taken,
                                         const StepOffsets& offsets, uint32_t seed) {
  FakeStepTensor tensor(kind, size, steps_taken, offsets);
  tensor[kGrad].fill(random_values(size, seed));
  std::mt19937 generator(seed);
  std::normal_distribution<double> normal;
  for (int64_t i = 0; i < size; ++i) {
    tensor.set_number(i, normal(generator));
    // The first moment has a sign. The third is the maximum of the second so far, which the next
    // one may exceed.
    for (int m = 0; m < ampfuse::math::kMostMoments; ++m) {
      const double value = normal(generator) * (kind.is_coded() ? 40 : 1);  // or codes
      if (m < kind.moments) tensor[kFirstMoment + m].set(i, m == 0 ? value : std::fabs(value));
    }
    if (kind.ema != NumberType::kNone) tensor[kEma].set(i, normal(generator));
  }
  for (const int column : {int(kFirstUnit), kFirstUnit + 1}) {
    for (int64_t g = 0; g < tensor[column].size; ++g) {
      tensor[column].set(g, 1e-3 * (1 + g % 3));
    }
  }
  return tensor;
}

// Returns tensors with sizes on both sides of each unit of the kernel: a pack (1, 2 or 4 elements),
// a pack per lane (32, 64 or 128), a chunk (2048) and several chunks. Step counts differ between
// tensors, and some are 0.
inline FakeStepTensors step_boundary_tensors(const StepKind& kind,
                                             const StepOffsets& offsets = {}) {
  const int64_t sizes[] = {0,  1,  2,   3,   4,   5,    31,   32,   33,   63,
                           64, 65, 127, 128, 129, 2047, 2048, 2049, 8191, 8193};
  FakeStepTensors tensors;
  uint32_t seed = 0;
  for (const int64_t size : sizes) {
    const auto steps_taken = static_cast<float>(seed % 5 * seed);
    tensors.push_back(random_step_tensor(kind, size, steps_taken, offsets, seed++));
  }
  return tensors;
}

// The defaults of torch.optim.AdamW, except for weight_decay.
inline AdamStepOptions adamw_options() {
  return {{.beta1 = 0.9, .beta2 = 0.999, .weight_decay = 0.1, .eps = 1e-8, .decoupled = true}, {}};
}

// Signals of a step with a learning rate, but without skipping, unscaling or clipping.
inline StepSignals signals_with(ampfuse::StepScalar lr) {
  StepSignals signals = {};
  signals.lr = lr;
  return signals;
}
inline StepSignals signals_with_lr(double lr) {
  return signals_with({nullptr, true, lr});
}

// A plan whose fields are separate allocations; its factor and rates are NaN until a kernel
// writes them.
template <typename Rule, typename acc_t>
struct HostPlan {
  using Step = ampfuse::math::TensorStep<typename Rule::template Step<acc_t>>;
  std::vector<Step> steps;
  std::unique_ptr<acc_t> grad_factor = std::make_unique<acc_t>(NAN);
  std::unique_ptr<bool> skip = std::make_unique<bool>();

  explicit HostPlan(size_t tensors)
      : steps(tensors, {Rule::template step<acc_t>({}, /*lr=*/NAN, /*count=*/1)}) {}

  ampfuse::StepPlan<Rule, acc_t> plan() { return {grad_factor.get(), skip.get(), steps.data()}; }
};

// These functions return their number of launches. Tensors must be of one kind.

// A counter, which may be null, and the index of its tensor's first element.
struct HostCounter {
  float* count;
  int64_t first_index = 0;
};

template <typename Rule, typename acc_t>
int prepare_on_host(const std::vector<HostCounter>& counters, const HostOptions<Rule>& options,
                    const StepSignals& signals, HostPlan<Rule, acc_t>& plan);

template <typename Rule, typename acc_t>
int update_on_host(const FakeStepTensors& tensors, const HostOptions<Rule>& options, int64_t first,
                   HostPlan<Rule, acc_t>& plan);

// A negative number of steps taken stands for a tensor without a counter.
template <typename Rule>
int step_on_host(FakeStepTensors& tensors, const HostOptions<Rule>& options,
                 const StepSignals& signals);
