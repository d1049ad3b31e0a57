#include "multi_tensor_norm.cuh"

#include "multi_tensor_norm_launch.cuh"

namespace ampfuse {

void launch_multi_tensor_norm(CudaCaller& caller, const std::vector<TensorRun>& runs,
                              math::NormType type, const NormPointers& outputs) {
  const LaunchStream stream(caller);
  const NormScratch scratch(caller, runs);
  dispatch_norm_type(type, [&]<math::NormType kNorm>() {
    for_each_norm_table<kNorm>(
        runs, scratch, [&]<typename scalar_t>(const NormTable& table, int64_t slots) {
          stream.launch(multi_tensor_norm_kernel<kNorm, scalar_t>, table.chunks(), table, slots,
                        scratch.partials, scratch.finished);
        });
    launch_norm_finish<kNorm>(stream, scratch, outputs, static_cast<int64_t>(runs.size()));
  });
}

}  // namespace ampfuse
