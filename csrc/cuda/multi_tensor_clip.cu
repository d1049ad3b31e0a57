#include "multi_tensor_clip.cuh"

#include <torch/library.h>

#include "../ops/multi_tensor_clip.h"
#include "dispatch.h"
#include "stream.h"

namespace ampfuse {

namespace {

template <typename norm_t>
void clip(at::TensorList tensors, const norm_t* total_norm, double max_norm) {
  for (auto& round : distinct_rounds(tensors)) {
    if (round.empty()) continue;
    const LaunchStream stream(round[0]);
    const DenseTensors dense(std::move(round));
    for (const DtypeGroup& group : dtype_groups(writable_runs(dense.get(), Complex::kAsReal))) {
      dispatch_real(group.dtype, [&]<typename scalar_t>() {
        auto builder = build_tables<UnscaleTable>([&](const UnscaleTable& table) {
          stream.launch(multi_tensor_clip_kernel<scalar_t, norm_t>, table.chunks(), table,
                        total_norm, max_norm);
        });
        for (const TensorRun& run : group.runs) builder.add({run.data}, run.size);
        builder.flush();
      });
    }
    dense.write_back();
  }
}

void multi_tensor_clip_cuda(at::TensorList tensors, const at::Tensor& total_norm, double max_norm) {
  check_multi_tensor_clip(tensors, total_norm);
  if (total_norm.scalar_type() == at::kDouble) {
    clip(tensors, total_norm.const_data_ptr<double>(), max_norm);
  } else {
    clip(tensors, total_norm.const_data_ptr<float>(), max_norm);
  }
}

}  // namespace

TORCH_LIBRARY_IMPL(ampfuse, CUDA, m) {
  m.impl("multi_tensor_clip", multi_tensor_clip_cuda);
}

}  // namespace ampfuse
