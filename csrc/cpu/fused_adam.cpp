#include "vec/fused_adam.h"
#include "../ops/fused_adam_kernels.h"
#include "../ops/fused_adam_tensors.h"
#include "chunks.h"

namespace ampfuse {

namespace {

double value_or(const std::optional<at::Tensor>& scalar, double otherwise) {
  return scalar ? scalar->item<double>() : otherwise;
}

// Increments the step count of every tensor. Most counts equal the one before: these share one
// computation.
std::vector<math::AdamStep<double>> count_steps(const std::vector<AdamTensor>& tensors,
                                                const math::AdamOptions& options, double lr) {
  std::vector<math::AdamStep<double>> steps(tensors.size());
  float last = 0;
  for (size_t t = 0; t < tensors.size(); ++t) {
    // Each count is a tensor with a cache line of its own, which the hardware does not prefetch.
    if (t + 8 < tensors.size()) __builtin_prefetch(tensors[t + 8].step);
    const float count = *tensors[t].step += 1;
    steps[t] = t > 0 && count == last ? steps[t - 1] : math::adam_step<double>(options, lr, count);
    last = count;
  }
  return steps;
}

AdamSpans spans_of(const AdamTensor& tensor, int64_t offset) {
  const auto& [param, grad, state, master] = tensor.dtypes;
  const std::array<at::ScalarType, math::kAdamColumns> dtypes = {param, grad,  state,
                                                                 state, state, master};
  AdamSpans spans;
  for (int c = 0; c < math::kAdamColumns; ++c) {
    if (tensor.data[c] != nullptr) spans[c] = {tensor.data[c], dtypes[c]};
  }
  return advanced(spans, offset);
}

// Prefetches the first 256 bytes of each column. The hardware prefetches the rest.
void prefetch(const AdamTensor& tensor) {
  for (const void* data : tensor.data) {
    for (int64_t line = 0; data != nullptr && line < 4; ++line) {
      __builtin_prefetch(static_cast<const char*>(data) + 64 * line);
    }
  }
}

void fused_adam_cpu(const FusedAdamArguments& arguments) {
  if (arguments.count() == 0) return;
  const math::AdamOptions& options = arguments.options;
  const math::AdamGradients gradients =
      math::adam_gradients(value_or(arguments.grad_scale, 1), arguments.total_norm.has_value(),
                           value_or(arguments.total_norm, 0), arguments.max_norm);
  const AdamTensors all(arguments);
  const std::vector<AdamTensor>& tensors = all.get();
  if (arguments.grad_norm) {
    *arguments.grad_norm->mutable_data_ptr<float>() = static_cast<float>(gradients.norm);
  }
  if (math::skips_step(static_cast<float>(value_or(arguments.found_inf, 0)),
                       static_cast<float>(value_or(arguments.grad_scale, 1)))) {
    return;
  }
  const auto steps = count_steps(tensors, options, arguments.lr.item<double>());
  std::vector<TensorRun> params;
  params.reserve(tensors.size());
  for (const AdamTensor& tensor : tensors) {
    params.push_back({tensor.data[math::kParam], tensor.size, tensor.dtypes.param});
  }
  const auto fused_adam_chunk = AMPFUSE_CHOOSE(fused_adam_chunk);
  Chunks(std::move(params)).parallel_for([&](const Chunk& chunk) {
    if (chunk.offset == 0 && chunk.tensor + 1 < tensors.size()) prefetch(tensors[chunk.tensor + 1]);
    fused_adam_chunk(spans_of(tensors[chunk.tensor], chunk.offset), chunk.size, gradients.factor,
                     options, steps[chunk.tensor]);
  });
  all.write_back();
}

}  // namespace

AMPFUSE_KERNELS(CPU, m) {
  register_fused_adam<fused_adam_cpu>(m);
}

}  // namespace ampfuse
