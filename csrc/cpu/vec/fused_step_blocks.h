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
#include "convert.h"
#include "lane.h"

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

template <typename Rule, int kCount, typename acc_t>
void update(const StepArrays<acc_t>& arrays, int64_t count, acc_t grad_factor,
            const math::StepOptions& options,
            const typename Rule::template Constants<acc_t>& constants,
            const typename Rule::template Step<acc_t>& step) {
  using Vec = Vectorized<acc_t>;
  const Vec factor(grad_factor);
  for (int64_t i = 0; i < count; i += Vec::size()) {
    const int64_t rest = std::min<int64_t>(Vec::size(), count - i);
    math::StepElement<Vec, kCount> x;
    x.param = Vec::loadu(arrays.param + i, rest);
    for (int m = 0; m < kCount; ++m) x.moments[m] = Vec::loadu(arrays.moments[m] + i, rest);
    const Vec grad = Vec::loadu(arrays.grad + i, rest) * factor;
    x = Rule::template update<kCount>(x, options.maximize ? Vec(0) - grad : grad, constants, step);
    x.param.store(arrays.param + i, rest);
    for (int m = 0; m < kCount; ++m) x.moments[m].store(arrays.moments[m] + i, rest);
    if (options.write_back_grads) grad.store(arrays.grad + i, rest);
  }
}

// Calls update() for the number of moments in use.
template <typename Rule, typename acc_t>
void update(const StepArrays<acc_t>& arrays, int64_t count, const ChunkStep<Rule>& chunk,
            const typename Rule::template Constants<acc_t>& constants,
            const typename Rule::template Step<acc_t>& step) {
  const auto run = [&](auto of_rule) {
    update<Rule, decltype(of_rule)::value>(arrays, count, static_cast<acc_t>(chunk.grad_factor),
                                           chunk.options, constants, step);
  };
  [&]<size_t... i>(std::index_sequence<i...>) {
    ((Rule::kCounts[i] == chunk.moments ? run(std::integral_constant<int, Rule::kCounts[i]>{})
                                        : void()),
     ...);
  }(std::make_index_sequence<std::size(Rule::kCounts)>());
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

// Loads the values that a step updates (the masters, or else the parameters), calls step(values)
// and stores the result.
template <typename Step>
void with_stepped(const StepSpan& param, const StepSpan& master, int64_t count, float* buffer,
                  const Step& step) {
  if (master.dtype == c10::ScalarType::Short) {
    auto* const params = static_cast<uint16_t*>(param.data);
    auto* const remainders = static_cast<int16_t*>(master.data);
    for (int64_t i = 0; i < count; ++i) {
      buffer[i] = math::join_float({params[i], remainders[i]});
    }
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

template <typename Rule>
void step_block(const StepSpans& spans, int64_t count, const ChunkStep<Rule>& chunk,
                const typename Rule::template Constants<float>& constants,
                const typename Rule::template Step<float>& step) {
  alignas(64) float buffers[2 + Rule::kMoments][kBlock];
  if (chunk.options.adopt_params && spans[math::kMaster].dtype == c10::ScalarType::Float) {
    adopt(spans[math::kParam], spans[math::kMaster], count);
  }
  with_stepped(spans[math::kParam], spans[math::kMaster], count, buffers[0], [&](float* params) {
    StepArrays<float> arrays = {params, load(spans[math::kGrad], count, buffers[1]), {}};
    for (int m = 0; m < chunk.moments; ++m) {
      arrays.moments[m] = load(spans[math::kFirstMoment + m], count, buffers[2 + m]);
    }
    update<Rule, float>(arrays, count, chunk, constants, step);
    if (chunk.options.write_back_grads) store(arrays.grad, spans[math::kGrad], count);
    for (int m = 0; m < chunk.moments; ++m) {
      store(arrays.moments[m], spans[math::kFirstMoment + m], count);
    }
  });
}

template <typename Rule>
void step_doubles(const StepSpans& spans, int64_t count, const ChunkStep<Rule>& chunk,
                  const typename Rule::template Step<double>& step) {
  const auto doubles = [&spans](int column) { return static_cast<double*>(spans[column].data); };
  StepArrays<double> arrays = {doubles(math::kParam), doubles(math::kGrad), {}};
  for (int m = 0; m < chunk.moments; ++m) arrays.moments[m] = doubles(math::kFirstMoment + m);
  const typename Rule::template Constants<double> constants(chunk.rule_options);
  update<Rule, double>(arrays, count, chunk, constants, step);
}

template <typename Rule>
void step_chunk(const StepSpans& spans, int64_t count, const ChunkStep<Rule>& chunk,
                const typename Rule::template Step<double>& step) {
  if (spans[math::kParam].dtype == c10::ScalarType::Double) {
    step_doubles(spans, count, chunk, step);
    return;
  }
  const typename Rule::template Constants<float> constants(chunk.rule_options);
  const auto narrow_step = step.template as<float>();
  for (int64_t offset = 0; offset < count; offset += kBlock) {
    step_block(advanced(spans, offset), std::min(kBlock, count - offset), chunk, constants,
               narrow_step);
  }
}

}  // namespace ampfuse::CPU_CAPABILITY
