#include "../ops/fused_adam.h"

#include "chunks.h"
#include "vec/fused_adam.h"

namespace ampfuse {

namespace {

double value_or(const std::optional<at::Tensor>& scalar, double otherwise) {
  return scalar ? scalar->item<double>() : otherwise;
}

// Counts the step of every tensor. Most have taken equally many: these share one computation.
std::vector<math::AdamStep<double>> count_steps(const std::vector<AdamTensor>& tensors,
                                                const math::AdamOptions& options, double lr) {
  std::vector<math::AdamStep<double>> steps;
  steps.reserve(tensors.size());
  float last = 0;
  for (const AdamTensor& tensor : tensors) {
    *tensor.step += 1;
    steps.push_back(!steps.empty() && *tensor.step == last
                        ? steps.back()
                        : math::adam_step<double>(options, lr, *tensor.step));
    last = *tensor.step;
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
  if (value_or(arguments.found_inf, 0) != 0) return;
  const auto steps = count_steps(tensors, options, arguments.lr.item<double>());
  std::vector<TensorRun> params;
  params.reserve(tensors.size());
  for (const AdamTensor& tensor : tensors) {
    params.push_back({tensor.data[math::kParam], tensor.size, tensor.dtypes.param});
  }
  const auto fused_adam_chunk = AMPFUSE_CHOOSE(fused_adam_chunk);
  Chunks(std::move(params)).parallel_for([&](const Chunk& chunk) {
    fused_adam_chunk(spans_of(tensors[chunk.tensor], chunk.offset), chunk.size, gradients.factor,
                     options, steps[chunk.tensor]);
  });
  all.write_back();
}

}  // namespace

TORCH_LIBRARY_IMPL(ampfuse, CPU, m) {
  register_fused_adam<fused_adam_cpu>(m);
}

}  // namespace ampfuse
