#include "multi_tensor_clip.cuh"

#include "../ops/multi_tensor_clip.h"
#include "multi_tensor_elementwise.h"
#include "stream.h"

namespace ampfuse {

namespace {

template <typename norm_t>
void clip(const LaunchStream& stream, const DenseRuns& dense, const norm_t* total_norm,
          double max_norm) {
  for_each_table<ElementwiseTable>(dense.get(),
                                   [&]<typename scalar_t>(const ElementwiseTable& table) {
                                     stream.launch(multi_tensor_clip_kernel<scalar_t, norm_t>,
                                                   table.chunks(), table, total_norm, max_norm);
                                   });
}

}  // namespace

void multi_tensor_clip_cuda(at::TensorList tensors, const at::Tensor& total_norm, double max_norm) {
  const DenseRuns dense("multi_tensor_clip", tensors, ComplexAs::kRealPairs, Use::kWrite);
  check_clip_norm(tensors, total_norm);
  const LaunchStream stream(total_norm);
  if (total_norm.scalar_type() == at::kDouble) {
    clip(stream, dense, total_norm.const_data_ptr<double>(), max_norm);
  } else {
    clip(stream, dense, total_norm.const_data_ptr<float>(), max_norm);
  }
  dense.write_back();
}

}  // namespace ampfuse
