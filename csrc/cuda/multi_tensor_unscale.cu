#include "multi_tensor_unscale.cuh"

#include "../ops/multi_tensor_unscale.h"
#include "multi_tensor_elementwise.h"
#include "multi_tensor_norm_launch.h"

namespace ampfuse {

void multi_tensor_unscale_cuda(at::TensorList tensors, const at::Tensor& found_inf,
                               const at::Tensor& inv_scale) {
  const DenseRuns dense("multi_tensor_unscale", tensors, ComplexAs::kRealPairs, Use::kWrite);
  check_unscale_scalars("multi_tensor_unscale", tensors, found_inf, inv_scale);
  const LaunchStream stream(found_inf);
  for_each_table<ElementwiseTable>(
      dense.get(), [&]<typename scalar_t>(const ElementwiseTable& table) {
        stream.launch(multi_tensor_unscale_kernel<scalar_t>, table.chunks(), table,
                      inv_scale.const_data_ptr<float>(), found_inf.mutable_data_ptr<float>());
      });
  dense.write_back();
}

UnscaledNormOutputs multi_tensor_unscale_norm_cuda(at::TensorList tensors,
                                                   const at::Tensor& found_inf,
                                                   const at::Tensor& inv_scale, double ord,
                                                   std::optional<at::ScalarType> dtype) {
  const char* op = "multi_tensor_unscale_norm";
  const math::NormType type = norm_type(op, ord);
  check_norm_dtype(op, dtype);
  const DenseRuns dense(op, tensors, complex_as(type), Use::kWrite);
  check_unscale_scalars(op, tensors, found_inf, inv_scale);
  if (tensors.empty()) return unscaled(zero_norm_outputs(found_inf.device(), dtype));
  const LaunchStream stream(found_inf);
  const std::vector<TensorRun>& runs = dense.get();
  const NormScratch scratch(runs, found_inf.device());
  const NormOutputs outputs = empty_norm_outputs(tensors, dtype);
  dispatch_norm_type(type, [&]<math::NormType kNorm>() {
    for_each_norm_table<kNorm>(
        runs, scratch, [&]<typename scalar_t>(const NormTable& table, int64_t slots) {
          stream.launch(multi_tensor_unscale_norm_kernel<kNorm, scalar_t>, table.chunks(), table,
                        inv_scale.const_data_ptr<float>(), slots, scratch.partials,
                        scratch.finished);
        });
    launch_norm_finish<kNorm>(stream, scratch, outputs, found_inf, /*clear_found_inf=*/false);
  });
  dense.write_back();
  return unscaled(outputs);
}

}  // namespace ampfuse
