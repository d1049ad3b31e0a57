#include "bad_targets.h"

#include <c10/util/Exception.h>

#include <atomic>
#include <cstdlib>
#include <cstring>
#include <map>

#include "../ops/cross_entropy_target_check.h"

namespace ampfuse {

BadTargets::BadTargets(CudaCaller& caller) : bad_target_(allocate_bad_target(caller)) {
  const char* const setting = std::getenv("AMPFUSE_TARGETS");
  trap_ = setting != nullptr && std::strcmp(setting, "trap") == 0;
}

void BadTargets::raise_earlier() {
  const std::lock_guard lock(mutex_);
  volatile BadTarget& bad_target = *bad_target_;
  if (bad_target.is_set == 0) return;
  // Clear the flag before reading the report, so that a later report is not lost. If a kernel
  // writes a new report during this read, the message may contain the row of one report and the
  // target of the other.
  bad_target.is_set = 0;
  std::atomic_thread_fence(std::memory_order_seq_cst);
  const int64_t row = bad_target.row;
  const int64_t target = bad_target.target;
  TORCH_CHECK_INDEX(false, "Target ", target, " is out of bounds: it was in row ", row,
                    " of an earlier call, whose loss is NaN");
}

void BadTargets::report_for(LogitRows& rows) const {
  rows.bad_target = bad_target_;
  rows.trap = trap_;
}

namespace {

struct AllBadTargets {
  std::mutex mutex;
  std::map<int, BadTargets> of_devices;
};

AllBadTargets& all_bad_targets() {
  static AllBadTargets all;
  return all;
}

void raise_all() {
  AllBadTargets& all = all_bad_targets();
  const std::lock_guard lock(all.mutex);
  for (auto& [device, bad_targets] : all.of_devices) bad_targets.raise_earlier();
}

[[maybe_unused]] const bool is_registered = (set_target_check(raise_all), true);

}  // namespace

BadTargets& bad_targets_of(CudaCaller& caller) {
  AllBadTargets& all = all_bad_targets();
  const std::lock_guard lock(all.mutex);
  return all.of_devices.try_emplace(caller.device, caller).first->second;
}

}  // namespace ampfuse
