#include "cross_entropy_backward.cuh"

#include "cross_entropy_launch.h"
#include "dispatch.h"
#include "stream.h"

namespace ampfuse {

void cross_entropy_backward_cuda(const CrossEntropyArguments& arguments,
                                 const at::Tensor& grad_output, const at::Tensor& statistics,
                                 const at::Tensor& divisor, const at::Tensor& grad) {
  check_cross_entropy_memory(arguments);
  const LaunchStream stream(arguments.input);
  dispatch_real(arguments.input.scalar_type(), [&]<typename scalar_t>() {
    at::Tensor converted;
    const auto table = table_of<scalar_t>(arguments, converted);
    const auto launch = [&]<typename Team, RowWork kWork>() {
      const int blocks =
          resident_blocks<scalar_t, Team, kWork>(stream.multiprocessors(), table.rows);
      dispatch_gradient<scalar_t, Team>(grad.scalar_type(), [&]<typename grad_t>() {
        stream.launch(cross_entropy_backward_kernel<scalar_t, Team, kWork, grad_t>,
                      LaunchShape{blocks, Team::kBlock}, table,
                      static_cast<const math::RowStatistics*>(statistics.const_data_ptr()),
                      divisor.const_data_ptr<double>(), grad_output.const_data_ptr<double>(),
                      grad_output.dim() == 1, grad.mutable_data_ptr<grad_t>(), rows_at(grad));
      });
    };
    const bool plain = is_plain(arguments);
    if (arguments.has_positions()) return for_positions(plain, launch);
    for_rows_not_kept(table.classes * int64_t(sizeof(scalar_t)), plain, launch);
  });
}

void cross_entropy_rescale_cuda(const at::Tensor& grad, const at::Tensor& baked_scale,
                                const at::Tensor& grad_output) {
  const LaunchStream stream(grad);
  // Elements that a warp takes at a time from a contiguous gradient, whatever its row length.
  constexpr int64_t kChunk = 4096;
  const bool in_chunks = grad.is_contiguous();
  const int64_t stride = in_chunks ? kChunk : grad.stride(0);
  const int64_t count = in_chunks ? kChunk : grad.size(1);
  const int64_t extent = in_chunks ? grad.numel() : grad.size(0) * stride;
  TORCH_CHECK_VALUE(count <= kMostClasses, "cross_entropy_rescale_: grad: expected at most ",
                    kMostClasses, " classes, got ", count);
  dispatch_real(grad.scalar_type(), [&]<typename scalar_t>() {
    stream.launch(cross_entropy_rescale_kernel<scalar_t>, (extent + stride - 1) / stride,
                  grad.mutable_data_ptr<scalar_t>(), stride, extent, static_cast<int>(count),
                  baked_scale.const_data_ptr<float>(),
                  grad_output.const_data_ptr<RowAcc<scalar_t>>());
  });
}

}  // namespace ampfuse
