#include <c10/cuda/CUDAGraphsC10Utils.h>

#include "../tensors/capture.h"

namespace ampfuse {

namespace {

bool stream_is_capturing() {
  return c10::cuda::currentStreamCaptureStatusMayInitCtx() != c10::cuda::CaptureStatus::None;
}

[[maybe_unused]] const bool is_set = (set_capture_query(stream_is_capturing), true);

}  // namespace

}  // namespace ampfuse
