#include "multi_tensor_norm.cuh"

#include "multi_tensor_norm_launch.h"

namespace ampfuse {

NormOutputs multi_tensor_norm_cuda(at::TensorList tensors, double ord,
                                   std::optional<at::ScalarType> dtype) {
  const math::NormType type = norm_type("multi_tensor_norm", ord);
  check_norm_dtype("multi_tensor_norm", dtype);
  const DenseRuns dense("multi_tensor_norm", tensors, complex_as(type), Use::kRead);
  const LaunchStream stream(tensors[0]);
  const std::vector<TensorRun>& runs = dense.get();
  const NormScratch scratch(runs, tensors[0].device());
  const NormOutputs outputs = empty_norm_outputs(tensors, dtype);
  const at::Tensor& found_inf = std::get<2>(outputs);
  dispatch_norm_type(type, [&]<math::NormType kNorm>() {
    for_each_norm_table<kNorm>(
        runs, scratch, [&]<typename scalar_t>(const NormTable& table, int64_t slots) {
          stream.launch(multi_tensor_norm_kernel<kNorm, scalar_t>, table.chunks(), table, slots,
                        scratch.partials, scratch.finished);
        });
    launch_norm_finish<kNorm>(stream, scratch, outputs, found_inf,
                              /*clear_found_inf=*/true);
  });
  return outputs;
}

}  // namespace ampfuse
