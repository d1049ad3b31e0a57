#include "multi_tensor_clip.cuh"

#include <torch/library.h>

#include "../ops/borrowed_list.h"
#include "../ops/multi_tensor_clip.h"
#include "elementwise_launch.h"

namespace ampfuse {

namespace {

template <typename norm_t>
void clip(at::TensorList tensors, const norm_t* total_norm, double max_norm) {
  for_each_written_table<UnscaleTable>(
      "multi_tensor_clip", tensors,
      [&]<typename scalar_t>(const LaunchStream& stream, const UnscaleTable& table) {
        stream.launch(multi_tensor_clip_kernel<scalar_t, norm_t>, table.chunks(), table, total_norm,
                      max_norm);
      });
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
  m.impl("multi_tensor_clip", borrowing_kernel<multi_tensor_clip_cuda>());
}

}  // namespace ampfuse
