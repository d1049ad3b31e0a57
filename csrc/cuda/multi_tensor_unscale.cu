#include "multi_tensor_unscale.cuh"

#include "multi_tensor_norm_launch.cuh"

namespace ampfuse {

void launch_multi_tensor_unscale(CudaCaller& caller, const std::vector<TensorRun>& runs,
                                 const float* inv_scale, float* found_inf) {
  const LaunchStream stream(caller);
  for_each_table<ElementwiseTable>(runs, [&]<typename scalar_t>(const ElementwiseTable& table) {
    stream.launch(multi_tensor_unscale_kernel<scalar_t>, table.chunks(), table, inv_scale,
                  found_inf);
  });
}

void launch_multi_tensor_unscale_norm(CudaCaller& caller, const std::vector<TensorRun>& runs,
                                      math::NormType type, const float* inv_scale,
                                      const NormPointers& outputs) {
  const LaunchStream stream(caller);
  const NormScratch scratch(caller, runs);
  dispatch_norm_type(type, [&]<math::NormType kNorm>() {
    for_each_norm_table<kNorm>(
        runs, scratch, [&]<typename scalar_t>(const NormTable& table, int64_t slots) {
          stream.launch(multi_tensor_unscale_norm_kernel<kNorm, scalar_t>, table.chunks(), table,
                        inv_scale, slots, scratch.partials, scratch.finished);
        });
    launch_norm_finish<kNorm>(stream, scratch, outputs, static_cast<int64_t>(runs.size()));
  });
}

}  // namespace ampfuse
