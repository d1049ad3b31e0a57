// A fused step on vector registers. Columns that are not fp32 are converted one block at a time, in
// buffers that stay in the L1 cache, so that one loop serves every combination of types.
#pragma once

#include "fused_step.h"

#include <algorithm>
#include <cstring>
#include <iterator>
#include <type_traits>
#include <utility>

#include "../../math/split_float.h"
#include "../../math/stochastic_rounding.h"
#include "coded_moments.h"
#include "convert.h"
#include "each_vector.h"
#include "lane.h"
#include "random_words.h"

namespace ampfuse::CPU_CAPABILITY {

using at::vec::Vectorized;

// Elements in a block: 1 KiB of fp32. The conversion of a block waits for memory, and its
// arithmetic does not use memory. If blocks are short, the CPU starts to load the next block during
// the arithmetic. With blocks of 4 KiB, a step of Adam with bfloat16 moments took 1.6 times as
// long.
constexpr int64_t kBlock = 256;

template <typename acc_t>
struct StepArrays {
  acc_t* param;
  acc_t* grad;
  acc_t* moments[math::kMostMoments];
};

// Calls run.operator()<kCount>() for the number of moments in use.
template <typename Rule, typename Run>
void with_count(int moments, const Run& run) {
  [&]<size_t... i>(std::index_sequence<i...>) {
    ((Rule::kCounts[i] == moments ? run.template operator()<Rule::kCounts[i]>() : void()), ...);
  }(std::make_index_sequence<std::size(Rule::kCounts)>());
}

// Returns the root of a moment, as 8-bit codes need it. All moments but the first are at least 0,
// and a rule may already have taken their root.
template <typename Vec>
Vec root_of(const Vec& moment, int m) {
  using L = math::Lane<Vec>;
  if (m > 0) return L::sqrt(moment);
  return L::sqrt(L::abs(moment)) | (moment & Vec(-0.0f));
}

// With kAsRoots, the moments' roots replace them.
template <typename Rule, int kCount, bool kAsRoots, typename acc_t>
AMPFUSE_HOST_DEVICE void update(const StepArrays<acc_t>& arrays, int64_t count, acc_t grad_factor,
                                const math::StepOptions& options,
                                const typename Rule::template Constants<acc_t>& constants,
                                const typename Rule::template Step<acc_t>& step) {
  using Vec = Vectorized<acc_t>;
  const Vec factor(grad_factor);
  for_each_vector<Vec>(count, [&](int64_t i, int64_t rest) {
    math::StepElement<Vec, kCount> x;
    x.param = Vec::loadu(arrays.param + i, rest);
    for (int m = 0; m < kCount; ++m) x.moments[m] = Vec::loadu(arrays.moments[m] + i, rest);
    const Vec grad = Vec::loadu(arrays.grad + i, rest) * factor;
    x = Rule::template update<kCount>(x, options.maximize ? Vec(0) - grad : grad, constants, step);
    x.param.store(arrays.param + i, rest);
    for (int m = 0; m < kCount; ++m) {
      if constexpr (kAsRoots) x.moments[m] = root_of(x.moments[m], m);
      x.moments[m].store(arrays.moments[m] + i, rest);
    }
    if (options.write_back_grads) grad.store(arrays.grad + i, rest);
  });
}

// Returns a column as fp32: its own memory if it is fp32, else `buffer` with the converted values.
inline float* load(const StepSpan& span, int64_t count, float* buffer) {
  if (span.data == nullptr) return nullptr;
  switch (span.dtype) {
    case c10::ScalarType::Float:
      return static_cast<float*>(span.data);
    case c10::ScalarType::Half:
      widen(static_cast<const c10::Half*>(span.data), buffer, count);
      return buffer;
    default:
      widen(static_cast<const c10::BFloat16*>(span.data), buffer, count);
      return buffer;
  }
}

// Converts the values back to the column's type. Does nothing if they are the column's own memory.
inline void store(const float* values, const StepSpan& span, int64_t count) {
  if (span.data == nullptr || span.data == values) return;
  span.dtype == c10::ScalarType::Half
      ? narrow(values, static_cast<c10::Half*>(span.data), count)
      : narrow(values, static_cast<c10::BFloat16*>(span.data), count);
}

// Compares all parameters with their masters. This moves no more bytes, because every step writes
// the parameters and the cache has to fetch them anyway.
template <typename param_t>
void adopt(const param_t* params, float* masters, int64_t count) {
  param_t rounded[kBlock];
  narrow(masters, rounded, count);
  if (std::memcmp(rounded, params, count * sizeof(param_t)) == 0) return;
  for (int64_t i = 0; i < count; ++i) masters[i] = math::adopted(params[i], masters[i]);
}

inline void adopt(const StepSpan& param, const StepSpan& master, int64_t count) {
  auto* const masters = static_cast<float*>(master.data);
  param.dtype == c10::ScalarType::Half
      ? adopt(static_cast<const c10::Half*>(param.data), masters, count)
      : adopt(static_cast<const c10::BFloat16*>(param.data), masters, count);
}

// Joins parameters and remainders as math::join_float() does. For a number that is the sum of its
// two halves. Where a sum is NaN, the block is joined again with its rules for NaNs and infinities.
inline void join(const uint16_t* params, const int16_t* remainders, float* joined, int64_t count) {
  uint32_t largest = 0;
  for (int64_t i = 0; i < count; ++i) {
    const uint32_t sum =
        (static_cast<uint32_t>(params[i]) << 16) + static_cast<uint32_t>(int32_t{remainders[i]});
    joined[i] = __builtin_bit_cast(float, sum);
    largest = std::max(largest, sum & 0x7fffffffu);
  }
  if (!math::is_nan_pattern(largest)) return;
  for (int64_t i = 0; i < count; ++i) joined[i] = math::join_float({params[i], remainders[i]});
}

// Loads the values that a step updates (the masters, or else the parameters), calls step(values)
// and stores the result.
template <typename Step>
void with_stepped(const StepSpan& param, const StepSpan& master, int64_t count, float* buffer,
                  const Step& step) {
  if (master.dtype == c10::ScalarType::Short) {
    auto* const params = static_cast<uint16_t*>(param.data);
    auto* const remainders = static_cast<int16_t*>(master.data);
    join(params, remainders, buffer, count);
    step(buffer);
    for (int64_t i = 0; i < count; ++i) {
      const math::SplitFloat split = math::split_float(buffer[i]);
      params[i] = split.bfloat16;
      remainders[i] = split.remainder;
    }
  } else {
    float* const values = load(master.data != nullptr ? master : param, count, buffer);
    step(values);
    store(values, param, count);
  }
}

// Updates the exponential averages of the numbers that were stepped.
template <typename acc_t>
void average(const acc_t* values, acc_t* averages, int64_t count, acc_t weight, uint32_t step) {
  using Vec = Vectorized<acc_t>;
  for_each_vector<Vec>(count, [&](int64_t i, int64_t rest) {
    math::averaged(Vec::loadu(averages + i, rest), Vec::loadu(values + i, rest), weight, step)
        .store(averages + i, rest);
  });
}

// A block of elements whose arithmetic is in fp32.
template <typename Rule>
class StepBlock {
 public:
  StepBlock(const StepSpans& spans, int64_t count, const CallStep<Rule>& call)
      : spans_(spans), count_(count), call_(call) {}

  void step(const typename Rule::template Constants<float>& constants,
            const math::TensorStep<typename Rule::template Step<float>>& step) {
    const math::StepOptions& options = call_.options;
    if (options.adopt_params && spans_[math::kMaster].dtype == c10::ScalarType::Float) {
      adopt(spans_[math::kParam], spans_[math::kMaster], count_);
    }
    if (needs_randoms()) randoms_.draw(options.seed, step.count, step.first_index, count_);
    with_stepped(spans_[math::kParam], spans_[math::kMaster], count_, buffers_[0],
                 [&](float* params) {
                   float* const grads = load(spans_[math::kGrad], 1);
                   with_count<Rule>(call_.moments, [&]<int kCount>() {
                     step_moments<kCount>(params, grads, constants, step.of_rule);
                   });
                   if (options.write_back_grads) store(grads, spans_[math::kGrad], count_);
                   update_average(params, step.count);
                   if (rounds_params()) round_at_random(params);
                 });
  }

 private:
  static constexpr int kEmaBuffer = 2 + std::max(Rule::kMoments, math::kMostCodedMoments);

  const StepSpan& moment(int m) const { return spans_[math::kFirstMoment + m]; }
  bool is_coded() const { return spans_[math::kFirstUnit].data != nullptr; }
  bool rounds_params() const {
    return call_.options.round_at_random && spans_[math::kMaster].data == nullptr &&
           spans_[math::kParam].dtype != c10::ScalarType::Float;
  }
  bool needs_randoms() const {
    return is_coded() || rounds_params() || spans_[math::kEma].dtype == c10::ScalarType::BFloat16;
  }
  uint16_t* units(int m) const { return static_cast<uint16_t*>(spans_[math::kFirstUnit + m].data); }

  float* load(const StepSpan& span, int buffer) {
    return CPU_CAPABILITY::load(span, count_, buffers_[buffer]);
  }

  template <int kCount>
  void step_moments(float* params, float* grads,
                    const typename Rule::template Constants<float>& constants,
                    const typename Rule::template Step<float>& step) {
    if constexpr (kCount > 0 && kCount <= math::kMostCodedMoments) {
      if (is_coded()) return step_coded<kCount>(params, grads, constants, step);
    }
    StepArrays<float> arrays = {params, grads, {}};
    for (int m = 0; m < kCount; ++m) arrays.moments[m] = load(moment(m), 2 + m);
    update<Rule, kCount, false>(arrays, count_, static_cast<float>(call_.grad_factor),
                                call_.options, constants, step);
    for (int m = 0; m < kCount; ++m) store(arrays.moments[m], moment(m), count_);
  }

  template <int kCount>
  void step_coded(float* params, float* grads,
                  const typename Rule::template Constants<float>& constants,
                  const typename Rule::template Step<float>& step) {
    auto* const first = static_cast<int8_t*>(moment(0).data);
    auto* const second = static_cast<uint8_t*>(moment(1).data);
    float (*const moments)[kBlock] = buffers_ + 2;
    const auto update_group = [&](int64_t i, auto size) {
      const int64_t group = i / math::kCodeGroup;
      decode(first + i, units(0) + group, moments[0] + i, size);
      if constexpr (kCount > 1) decode(second + i, units(1) + group, moments[1] + i, size);
      update<Rule, kCount, true>({params + i, grads + i, {moments[0] + i, moments[1] + i}}, size,
                                 static_cast<float>(call_.grad_factor), call_.options, constants,
                                 step);
    };
    // The next group is decoded while the CPU still divides and takes roots for the one before.
    // The size of whole groups is a constant, for the compiler.
    constexpr std::integral_constant<int64_t, math::kCodeGroup> kGroup;
    int64_t i = 0;
    for (; i + kGroup <= count_; i += kGroup) update_group(i, kGroup);
    if (i < count_) update_group(i, count_ - i);
    encode<0, kBlock>(moments[0], randoms_.get(), first, units(0), count_);
    if constexpr (kCount > 1) {
      encode<1, kBlock>(moments[1], randoms_.get(), second, units(1), count_);
    }
  }

  void update_average(const float* params, uint32_t step) {
    const StepSpan& span = spans_[math::kEma];
    if (span.data == nullptr) return;
    float* const averages = load(span, kEmaBuffer);
    average(params, averages, count_, static_cast<float>(call_.options.ema_weight), step);
    if (span.dtype == c10::ScalarType::BFloat16) {
      const uint16_t* const randoms = randoms_.get();
      for (int64_t i = 0; i < count_; ++i) {
        averages[i] = math::rounded_to_bfloat16(averages[i], math::random_of_ema(randoms[i]));
      }
    }
    store(averages, span, count_);
  }

  void round_at_random(float* params) const {
    const uint16_t* const randoms = randoms_.get();
    if (spans_[math::kParam].dtype == c10::ScalarType::Half) {
      for (int64_t i = 0; i < count_; ++i) {
        params[i] = math::rounded_to_half(params[i], math::random_of_param(randoms[i]));
      }
    } else {
      for (int64_t i = 0; i < count_; ++i) {
        params[i] = math::rounded_to_bfloat16(params[i], math::random_of_param(randoms[i]));
      }
    }
  }

  const StepSpans& spans_;
  int64_t count_;
  const CallStep<Rule>& call_;
  alignas(64) float buffers_[kEmaBuffer + 1][kBlock];
  ElementRandoms<kBlock> randoms_;
};

template <typename Rule>
void step_doubles(const StepSpans& spans, int64_t count, const CallStep<Rule>& call,
                  const ChunkStep<Rule>& chunk) {
  const auto doubles = [&spans](int column) { return static_cast<double*>(spans[column].data); };
  StepArrays<double> arrays = {doubles(math::kParam), doubles(math::kGrad), {}};
  for (int m = 0; m < call.moments; ++m) arrays.moments[m] = doubles(math::kFirstMoment + m);
  const typename Rule::template Constants<double> constants(call.rule_options);
  with_count<Rule>(call.moments, [&]<int kCount>() {
    update<Rule, kCount, false>(arrays, count, call.grad_factor, call.options, constants,
                                chunk.of_rule);
  });
  if (doubles(math::kEma) != nullptr) {
    average(arrays.param, doubles(math::kEma), count, call.options.ema_weight, chunk.count);
  }
}

template <typename Rule>
void step_chunk(const StepSpans& spans, int64_t count, const CallStep<Rule>& call,
                const ChunkStep<Rule>& chunk) {
  if (spans[math::kParam].dtype == c10::ScalarType::Double) {
    step_doubles(spans, count, call, chunk);
    return;
  }
  const typename Rule::template Constants<float> constants(call.rule_options);
  const auto narrow_step = chunk.of_rule.template as<float>();
  for (int64_t offset = 0; offset < count; offset += kBlock) {
    const StepSpans of_block = advanced(spans, offset);
    StepBlock<Rule>(of_block, std::min(kBlock, count - offset), call)
        .step(constants, {narrow_step, chunk.count, chunk.first_index + offset});
  }
}

}  // namespace ampfuse::CPU_CAPABILITY
