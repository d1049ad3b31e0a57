// Runs CUDA kernels on the CPU, under the host compiler's sanitizers.
//
// Include this header before a kernel's header, and launch with a function call:
//
//   #include "simt/simt.h"
//   #include "cuda/scale.cuh"  // __global__ void scale_kernel(float*, float, int64_t)
//
//   TEST_CASE("scale multiplies every element") {
//     simt::for_each_schedule([] {
//       INFO(simt::schedule().name());
//       std::vector<float> x(1000, 2.0f);
//       simt::launch(scale_kernel, /*grid=*/4, /*block=*/256, /*dynamic shared bytes=*/0, x.data(),
//                    0.5f, 1000);
//       CHECK(x == std::vector<float>(1000, 1.0f));
//     });
//   }
//
// Each CUDA thread is a fiber of the one host thread; blocks run one after another. ASan and UBSan
// detect out-of-bounds, misaligned and overflowing accesses. TSan treats the fibers as threads that
// only barriers, __syncwarp and fenced atomics put in order. Shuffles do not order memory, and
// nothing else orders blocks. So TSan finds races in global and shared memory even if the result is
// right. The runtime itself reports divergent barriers and wrong warp masks (sync.h) and fills
// shared memory with NaNs. simt::launch throws the runtime's error, or an exception from the
// kernel; the frames of the other threads are then dropped without unwinding.
//
// The runtime has the device functions that kernels call, and grids of one dimension. Add what a
// new kernel needs.
//
// The runtime cannot show speed, occupancy, spills, real contention, memory-ordering effects,
// progress of blocks that wait for each other, approximate arithmetic, or the effects of a launch
// on a device. It finds races only between accesses that happened: a branch that no schedule takes
// is not checked.
#pragma once

#include "simt/atomics.h"
#include "simt/intrinsics.h"
#include "simt/keywords.h"
#include "simt/launch.h"
#include "simt/shared.h"
#include "simt/sync.h"
