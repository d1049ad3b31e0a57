// Adam on vector registers. Columns that are not fp32 are converted one block at a time, in buffers
// that stay in the L1 cache, so that one loop serves every combination of types.
#include "fused_adam.h"

#include <algorithm>
#include <cstring>

#include "../../math/fused_adam_remainder.h"
#include "convert.h"
#include "lane.h"

namespace ampfuse::CPU_CAPABILITY {

namespace {

using at::vec::Vectorized;

// Elements in a block: 1 KiB of fp32. The conversion of a block waits for memory, and its
// arithmetic does not use memory. If blocks are short, the CPU starts to load the next block during
// the arithmetic. With blocks of 4 KiB, a step with bfloat16 moments took 1.6 times as long.
constexpr int64_t kBlock = 256;

template <typename acc_t>
struct AdamArrays {
  acc_t* param;
  acc_t* grad;
  acc_t* exp_avg;
  acc_t* exp_avg_sq;
  acc_t* max_exp_avg_sq;
};

template <bool kAmsgrad, typename acc_t>
void update(const AdamArrays<acc_t>& arrays, int64_t count, acc_t grad_factor,
            const math::AdamConstants<acc_t>& constants, const math::AdamStep<acc_t>& step) {
  using Vec = Vectorized<acc_t>;
  const Vec factor(grad_factor);
  for (int64_t i = 0; i < count; i += Vec::size()) {
    const int64_t rest = std::min<int64_t>(Vec::size(), count - i);
    math::AdamElement<Vec> x = {Vec::loadu(arrays.param + i, rest),
                                Vec::loadu(arrays.exp_avg + i, rest),
                                Vec::loadu(arrays.exp_avg_sq + i, rest),
                                kAmsgrad ? Vec::loadu(arrays.max_exp_avg_sq + i, rest) : Vec(0)};
    const Vec grad = Vec::loadu(arrays.grad + i, rest) * factor;
    x = math::adam_update<kAmsgrad>(x, grad, constants, step);
    x.param.store(arrays.param + i, rest);
    x.exp_avg.store(arrays.exp_avg + i, rest);
    x.exp_avg_sq.store(arrays.exp_avg_sq + i, rest);
    if constexpr (kAmsgrad) x.max_exp_avg_sq.store(arrays.max_exp_avg_sq + i, rest);
    if (constants.write_back_grads) grad.store(arrays.grad + i, rest);
  }
}

template <typename acc_t>
void update(const AdamArrays<acc_t>& arrays, int64_t count, acc_t grad_factor, bool amsgrad,
            const math::AdamConstants<acc_t>& constants, const math::AdamStep<acc_t>& step) {
  amsgrad ? update<true>(arrays, count, grad_factor, constants, step)
          : update<false>(arrays, count, grad_factor, constants, step);
}

// Returns a column as fp32: its own memory if it is fp32, else `buffer` with the converted values.
float* load(const AdamSpan& span, int64_t count, float* buffer) {
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
void store(const float* values, const AdamSpan& span, int64_t count) {
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

void adopt(const AdamSpan& param, const AdamSpan& master, int64_t count) {
  auto* const masters = static_cast<float*>(master.data);
  param.dtype == c10::ScalarType::Half
      ? adopt(static_cast<const c10::Half*>(param.data), masters, count)
      : adopt(static_cast<const c10::BFloat16*>(param.data), masters, count);
}

// Loads the values that a step updates (the masters, or else the parameters), calls step(values)
// and stores the result.
template <typename Step>
void with_stepped(const AdamSpan& param, const AdamSpan& master, int64_t count, float* buffer,
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

void step_block(const AdamSpans& spans, int64_t count, float grad_factor,
                const math::AdamOptions& options, const math::AdamConstants<float>& constants,
                const math::AdamStep<float>& step) {
  alignas(64) float buffers[5][kBlock];
  if (options.adopt_params && spans[math::kMaster].dtype == c10::ScalarType::Float) {
    adopt(spans[math::kParam], spans[math::kMaster], count);
  }
  with_stepped(spans[math::kParam], spans[math::kMaster], count, buffers[0], [&](float* params) {
    const AdamArrays<float> arrays = {params, load(spans[math::kGrad], count, buffers[1]),
                                      load(spans[math::kExpAvg], count, buffers[2]),
                                      load(spans[math::kExpAvgSq], count, buffers[3]),
                                      load(spans[math::kMaxExpAvgSq], count, buffers[4])};
    update(arrays, count, grad_factor, options.amsgrad, constants, step);
    if (options.write_back_grads) store(arrays.grad, spans[math::kGrad], count);
    store(arrays.exp_avg, spans[math::kExpAvg], count);
    store(arrays.exp_avg_sq, spans[math::kExpAvgSq], count);
    store(arrays.max_exp_avg_sq, spans[math::kMaxExpAvgSq], count);
  });
}

void step_doubles(const AdamSpans& spans, int64_t count, double grad_factor,
                  const math::AdamOptions& options, const math::AdamStep<double>& step) {
  const auto doubles = [&spans](math::AdamColumn column) {
    return static_cast<double*>(spans[column].data);
  };
  const AdamArrays<double> arrays = {doubles(math::kParam), doubles(math::kGrad),
                                     doubles(math::kExpAvg), doubles(math::kExpAvgSq),
                                     doubles(math::kMaxExpAvgSq)};
  update(arrays, count, grad_factor, options.amsgrad, math::adam_constants<double>(options), step);
}

}  // namespace

void fused_adam_chunk(const AdamSpans& spans, int64_t count, double grad_factor,
                      const math::AdamOptions& options, const math::AdamStep<double>& step) {
  if (spans[math::kParam].dtype == c10::ScalarType::Double) {
    step_doubles(spans, count, grad_factor, options, step);
    return;
  }
  const auto constants = math::adam_constants<float>(options);
  const math::AdamStep<float> narrow_step = {static_cast<float>(step.size),
                                             static_cast<float>(step.floor),
                                             static_cast<float>(step.decay)};
  for (int64_t offset = 0; offset < count; offset += kBlock) {
    step_block(advanced(spans, offset), std::min(kBlock, count - offset),
               static_cast<float>(grad_factor), options, constants, narrow_step);
  }
}

}  // namespace ampfuse::CPU_CAPABILITY
