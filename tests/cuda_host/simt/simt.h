// CUDA kernels on the CPU, under the host compiler's sanitizers.
//
// Include this before a kernel's header, and launch with a function call:
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
// see out-of-bounds, misaligned and overflowing accesses. TSan takes the fibers for threads that
// only barriers, __syncwarp and fenced atomics put in order (shuffles do not, and blocks are in no
// order with each other), so it finds races in global and shared memory even where the result comes
// out right. The runtime itself refuses divergent barriers and wrong warp masks (sync.h) and fills
// shared memory with NaNs. Its error, like an exception from a kernel, leaves simt::launch as
// an exception; the other threads' frames are then dropped without unwinding.
//
// It cannot show speed, occupancy, spills, real contention, memory-ordering effects, progress of
// blocks that wait for each other, approximate arithmetic, or what a launch does on a device. Races
// are looked for between accesses that happened: a branch not taken in any schedule is not seen.
#pragma once

#include "simt/atomics.h"
#include "simt/intrinsics.h"
#include "simt/keywords.h"
#include "simt/launch.h"
#include "simt/shared.h"
#include "simt/sync.h"
