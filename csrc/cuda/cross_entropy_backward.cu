#include "cross_entropy_backward.cuh"

#include "cross_entropy_launch.cuh"

namespace ampfuse {

void launch_cross_entropy_backward(CudaCaller& caller, const LogitRows& rows,
                                   const BackwardPointers& pointers) {
  const LaunchStream stream(caller);
  dispatch_real(rows.dtype, [&]<typename scalar_t>() {
    const auto table = table_of<scalar_t>(rows);
    const auto launch = [&]<typename Team, RowWork kWork>() {
      const int blocks =
          resident_blocks<scalar_t, Team, kWork>(stream.multiprocessors(), table.rows);
      dispatch_gradient<scalar_t, Team>(pointers.grad_dtype, [&]<typename grad_t>() {
        stream.launch(cross_entropy_backward_kernel<scalar_t, Team, kWork, grad_t>,
                      LaunchShape{blocks, Team::kBlock}, table, pointers.statistics,
                      pointers.divisor, pointers.grad_output, pointers.is_per_row,
                      static_cast<grad_t*>(pointers.grad), pointers.grad_at);
      });
    };
    const bool plain = is_plain(rows);
    if (rows.are_positions) return for_positions(plain, launch);
    for_rows_not_kept(table.classes * int64_t(sizeof(scalar_t)), plain, launch);
  });
}

void launch_cross_entropy_rescale(CudaCaller& caller, const RescaledRows& rows,
                                  const float* baked_scale, const void* grad_output) {
  const LaunchStream stream(caller);
  dispatch_real(rows.dtype, [&]<typename scalar_t>() {
    stream.launch(cross_entropy_rescale_kernel<scalar_t>,
                  (rows.extent + rows.stride - 1) / rows.stride, static_cast<scalar_t*>(rows.grad),
                  rows.stride, rows.extent, rows.count, baked_scale,
                  static_cast<const RowAcc<scalar_t>*>(grad_output));
  });
}

}  // namespace ampfuse
