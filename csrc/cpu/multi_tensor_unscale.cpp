#include "../ops/multi_tensor_unscale.h"

#include <atomic>

#include "../ops/registration.h"
#include "../tensors/tensor_list.h"
#include "multi_tensor_norm.h"
#include "vec/multi_tensor_norm.h"
#include "vec/multi_tensor_scale.h"

namespace ampfuse {

namespace {

void multi_tensor_unscale_cpu(at::TensorList tensors, const at::Tensor& found_inf,
                              const at::Tensor& inv_scale) {
  const DenseRuns dense("multi_tensor_unscale", tensors, ComplexAs::kRealPairs, Use::kWrite);
  check_unscale_scalars("multi_tensor_unscale", tensors, found_inf, inv_scale);
  const double factor = *inv_scale.const_data_ptr<float>();
  const auto scale_chunk = AMPFUSE_CHOOSE(scale_chunk);
  std::atomic<bool> finite = true;
  Chunks(dense.get()).parallel_for([&](const Chunk& chunk) {
    if (!scale_chunk(chunk.dtype, chunk.data, chunk.size, factor)) {
      finite.store(false, std::memory_order_relaxed);
    }
  });
  if (factor != 1) dense.write_back();
  if (!finite) found_inf.fill_(1);
}

UnscaledNormOutputs multi_tensor_unscale_norm_cpu(at::TensorList tensors,
                                                  const at::Tensor& found_inf,
                                                  const at::Tensor& inv_scale, double ord,
                                                  std::optional<at::ScalarType> dtype) {
  const char* op = "multi_tensor_unscale_norm";
  const math::NormType type = norm_type(op, ord);
  check_norm_dtype(op, dtype);
  const DenseRuns dense(op, tensors, complex_as(type), Use::kWrite);
  check_unscale_scalars(op, tensors, found_inf, inv_scale);
  const double factor = *inv_scale.const_data_ptr<float>();
  const auto norm_chunk = AMPFUSE_CHOOSE(norm_chunk);
  const auto scale_norm_chunk = AMPFUSE_CHOOSE(scale_norm_chunk);
  const Chunks chunks(dense.get());
  std::vector<math::NormPartial> partials(chunks.count());
  chunks.parallel_for([&](const Chunk& chunk) {
    partials[chunk.index] =
        factor == 1 ? norm_chunk(type, chunk.dtype, chunk.data, chunk.size)
                    : scale_norm_chunk(type, chunk.dtype, chunk.data, chunk.size, factor);
  });
  if (factor != 1) dense.write_back();
  const NormOutputs outputs = empty_norm_outputs(tensors, dtype);
  write_norms(type, chunks, partials, outputs);
  const auto& [total_norm, norms, is_nonfinite, first_nonfinite, nonfinite_count] = outputs;
  if (*is_nonfinite.const_data_ptr<float>() != 0) found_inf.fill_(1);
  return unscaled(outputs);
}

}  // namespace

AMPFUSE_KERNELS(CPU, m) {
  m.impl("multi_tensor_unscale", multi_tensor_unscale_cpu);
  m.impl("multi_tensor_unscale_norm", multi_tensor_unscale_norm_cpu);
}

}  // namespace ampfuse
