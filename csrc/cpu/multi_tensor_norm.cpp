#include "multi_tensor_norm.h"

#include <ATen/Dispatch.h>

#include "../ops/registration.h"
#include "../tensors/tensor_list.h"
#include "vec/multi_tensor_norm.h"

namespace ampfuse {

namespace {

template <math::NormType kNorm>
void write_norms(const Chunks& chunks, const std::vector<math::NormPartial>& partials,
                 const NormOutputs& outputs) {
  // Clang before 16 refuses lambdas that use names of a structured binding.
  at::Tensor total_norm, norms, found_inf, first_nonfinite, nonfinite_count;
  std::tie(total_norm, norms, found_inf, first_nonfinite, nonfinite_count) = outputs;
  std::vector<math::NormPartial> tensors(norms.numel());
  int64_t first = -1;
  int64_t count = 0;
  for (size_t t = 0; t < tensors.size(); ++t) {
    const math::NormPartial* of_tensor = partials.data() + chunks.begin(t);
    tensors[t] = math::norm_of_partials<kNorm>(
        chunks.end(t) - chunks.begin(t), [&](int64_t i) { return of_tensor[i]; },
        math::OneWorker());
    if (tensors[t].nonfinite && count++ == 0) first = static_cast<int64_t>(t);
  }
  const math::NormPartial total = math::norm_of_partials<kNorm>(
      static_cast<int64_t>(tensors.size()), [&](int64_t i) { return tensors[i]; },
      math::OneWorker());
  // A norm that is too large for float becomes infinite in this cast; fill_ would throw.
  AT_DISPATCH_FLOATING_TYPES(norms.scalar_type(), "multi_tensor_norm", [&] {
    auto* out = norms.mutable_data_ptr<scalar_t>();
    for (const math::NormPartial& tensor : tensors) *out++ = static_cast<scalar_t>(tensor.norm);
    *total_norm.mutable_data_ptr<scalar_t>() = static_cast<scalar_t>(total.norm);
  });
  *found_inf.mutable_data_ptr<float>() = count > 0 ? 1.0f : 0.0f;
  *first_nonfinite.mutable_data_ptr<int64_t>() = first;
  *nonfinite_count.mutable_data_ptr<int64_t>() = count;
}

NormOutputs multi_tensor_norm_cpu(at::TensorList tensors, double ord,
                                  std::optional<at::ScalarType> dtype) {
  const math::NormType type = norm_type("multi_tensor_norm", ord);
  check_norm_dtype("multi_tensor_norm", dtype);
  const DenseRuns dense("multi_tensor_norm", tensors, complex_as(type), Use::kRead);
  const Chunks chunks(dense.get());
  std::vector<math::NormPartial> partials(chunks.count());
  const auto norm_chunk = AMPFUSE_CHOOSE(norm_chunk);
  chunks.parallel_for([&](const Chunk& chunk) {
    partials[chunk.index] = norm_chunk(type, chunk.dtype, chunk.data, chunk.size);
  });
  NormOutputs outputs = empty_norm_outputs(tensors, dtype);
  write_norms(type, chunks, partials, outputs);
  return outputs;
}

}  // namespace

void write_norms(math::NormType type, const Chunks& chunks,
                 const std::vector<math::NormPartial>& partials, const NormOutputs& outputs) {
  switch (type) {
    case math::NormType::kL1:
      return write_norms<math::NormType::kL1>(chunks, partials, outputs);
    case math::NormType::kL2:
      return write_norms<math::NormType::kL2>(chunks, partials, outputs);
    case math::NormType::kInf:
      return write_norms<math::NormType::kInf>(chunks, partials, outputs);
  }
}

AMPFUSE_KERNELS(CPU, m) {
  m.impl("multi_tensor_norm", multi_tensor_norm_cpu);
}

}  // namespace ampfuse
