#include "target_complaint.h"

#include <c10/cuda/CUDAException.h>
#include <c10/cuda/CUDAGraphsC10Utils.h>
#include <c10/cuda/CUDAGuard.h>
#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>
#include <mutex>

#include "../ops/target_check.h"

namespace ampfuse {

TargetComplaints::TargetComplaints(c10::Device device) {
  const char* const wish = std::getenv("AMPFUSE_TARGETS");
  are_fatal_ = wish != nullptr && std::strcmp(wish, "trap") == 0;
  const c10::cuda::CUDAGuard guard(device);
  void* memory = nullptr;
  // The first call may be inside the capture of a CUDA graph, where this is no part of the graph.
  const c10::cuda::CUDAStreamCaptureModeGuard relaxed(cudaStreamCaptureModeRelaxed);
  C10_CUDA_CHECK(cudaHostAlloc(&memory, sizeof(TargetComplaint), cudaHostAllocPortable));
  complaint_ = new (memory) TargetComplaint{};
}

void TargetComplaints::raise_earlier() {
  volatile TargetComplaint& complaint = *complaint_;
  if (complaint.is_set == 0) return;
  std::atomic_thread_fence(std::memory_order_acquire);
  const int64_t row = complaint.row;
  const int64_t target = complaint.target;
  complaint.is_set = 0;
  TORCH_CHECK_INDEX(false, "cross_entropy: Target ", target, " is out of bounds. It was row ", row,
                    "'s in an earlier call, whose loss is NaN");
}

namespace {

struct AllComplaints {
  std::mutex mutex;
  std::map<c10::DeviceIndex, TargetComplaints> of_devices;
};

AllComplaints& all_complaints() {
  static AllComplaints all;
  return all;
}

void raise_all() {
  AllComplaints& all = all_complaints();
  const std::lock_guard lock(all.mutex);
  for (auto& [device, complaints] : all.of_devices) complaints.raise_earlier();
}

[[maybe_unused]] const bool is_set = (set_target_check(raise_all), true);

}  // namespace

TargetComplaints& target_complaints(c10::Device device) {
  AllComplaints& all = all_complaints();
  const std::lock_guard lock(all.mutex);
  return all.of_devices.try_emplace(device.index(), device).first->second;
}

}  // namespace ampfuse
