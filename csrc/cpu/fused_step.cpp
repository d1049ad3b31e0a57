#include "vec/fused_step.h"
#include "../ops/fused_adam.h"
#include "../ops/fused_sgd.h"
#include "../ops/fused_step_kernels.h"
#include "../ops/fused_step_tensors.h"
#include "chunks.h"

namespace ampfuse {

namespace {

double value_or(const std::optional<at::Tensor>& scalar, double otherwise) {
  return scalar ? scalar->item<double>() : otherwise;
}

// Increments the step count of every tensor. Most counts equal the one before: these share one
// computation. A tensor without a count has a step that does not depend on it.
template <typename Rule>
std::vector<ChunkStep<Rule>> count_steps(const std::vector<StepTensor>& tensors,
                                         const typename Rule::Options& options, double lr) {
  std::vector<ChunkStep<Rule>> steps(tensors.size());
  float last = 0;
  for (size_t t = 0; t < tensors.size(); ++t) {
    // Each count is a tensor with a cache line of its own, which the hardware does not prefetch.
    if (t + 8 < tensors.size()) __builtin_prefetch(tensors[t + 8].step);
    const float count = tensors[t].step == nullptr ? 1 : *tensors[t].step += 1;
    steps[t].of_rule = t > 0 && count == last ? steps[t - 1].of_rule
                                              : Rule::template step<double>(options, lr, count);
    steps[t].count = static_cast<uint32_t>(count);
    steps[t].first_index = tensors[t].first_index;
    last = count;
  }
  return steps;
}

StepSpans spans_of(const StepTensor& tensor, int64_t offset) {
  const auto& [param, grad, state, master, ema] = tensor.dtypes;
  const at::ScalarType later = state == at::kChar ? at::kByte : state;  // moments after the first
  const std::array<at::ScalarType, math::kMostColumns> dtypes = {
      param, grad, master, state, later, later, at::kBFloat16, at::kBFloat16, ema};
  StepSpans spans;
  for (int c = 0; c < math::kMostColumns; ++c) {
    if (tensor.data[c] != nullptr) spans[c] = {tensor.data[c], dtypes[c]};
  }
  return advanced(spans, offset);
}

// Prefetches the first 256 bytes of each column. The hardware prefetches the rest.
void prefetch(const StepTensor& tensor) {
  for (const void* data : tensor.data) {
    for (int64_t line = 0; data != nullptr && line < 4; ++line) {
      __builtin_prefetch(static_cast<const char*>(data) + 64 * line);
    }
  }
}

// `step_chunk` is the rule's function of vec/fused_step.h.
template <typename Rule, typename StepChunk>
void fused_step(const FusedRuleArguments<Rule>& arguments, const StepChunk& step_chunk) {
  if (arguments.count() == 0) return;
  const math::StepGradients gradients =
      math::step_gradients(value_or(arguments.grad_scale, 1), arguments.total_norm.has_value(),
                           value_or(arguments.total_norm, 0), arguments.max_norm);
  const StepTensors all(arguments);
  const std::vector<StepTensor>& tensors = all.get();
  if (arguments.grad_norm) {
    *arguments.grad_norm->template mutable_data_ptr<float>() = static_cast<float>(gradients.norm);
  }
  if (math::skips_step(static_cast<float>(value_or(arguments.found_inf, 0)),
                       static_cast<float>(value_or(arguments.grad_scale, 1)))) {
    return;
  }
  const auto steps =
      count_steps<Rule>(tensors, arguments.rule_options, arguments.lr.template item<double>());
  std::vector<TensorRun> params;
  params.reserve(tensors.size());
  for (const StepTensor& tensor : tensors) {
    params.push_back({tensor.data[math::kParam], tensor.size, tensor.dtypes.param});
  }
  const CallStep<Rule> of_call = {arguments.options, arguments.rule_options, arguments.moments,
                                  gradients.factor};
  Chunks(std::move(params)).parallel_for([&](const Chunk& chunk) {
    if (chunk.offset == 0 && chunk.tensor + 1 < tensors.size()) prefetch(tensors[chunk.tensor + 1]);
    ChunkStep<Rule> of_chunk = steps[chunk.tensor];
    of_chunk.first_index += chunk.offset;
    step_chunk(spans_of(tensors[chunk.tensor], chunk.offset), chunk.size, of_call, of_chunk);
  });
  all.write_back();
}

void fused_adam_cpu(const FusedAdamArguments& arguments) {
  fused_step(arguments, AMPFUSE_CHOOSE(fused_adam_chunk));
}

void fused_sgd_cpu(const FusedSgdArguments& arguments) {
  fused_step(arguments, AMPFUSE_CHOOSE(fused_sgd_chunk));
}

}  // namespace

AMPFUSE_KERNELS(CPU, m) {
  register_fused_step<fused_adam_arguments, fused_adam_cpu>(m, "fused_adam");
  register_fused_step<fused_sgd_arguments, fused_sgd_cpu>(m, "fused_sgd");
}

}  // namespace ampfuse
