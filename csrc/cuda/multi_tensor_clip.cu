#include "multi_tensor_clip.cuh"

#include "dispatch.cuh"
#include "multi_tensor_interface.h"
#include "stream.cuh"

namespace ampfuse {

void launch_multi_tensor_clip(CudaCaller& caller, const std::vector<TensorRun>& runs,
                              const void* total_norm, bool is_double, double max_norm) {
  const LaunchStream stream(caller);
  const auto clip = [&]<typename norm_t>() {
    for_each_table<ElementwiseTable>(runs, [&]<typename scalar_t>(const ElementwiseTable& table) {
      stream.launch(multi_tensor_clip_kernel<scalar_t, norm_t>, table.chunks(), table,
                    static_cast<const norm_t*>(total_norm), max_norm);
    });
  };
  is_double ? clip.template operator()<double>() : clip.template operator()<float>();
}

}  // namespace ampfuse
