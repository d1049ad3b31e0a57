#include "cross_entropy_targets.h"

namespace ampfuse::CPU_CAPABILITY {

namespace {

template <typename Index>
TargetCount count_targets_of(const void* data, int64_t count, int64_t ignore_index,
                             int64_t classes) {
  const auto* const indices = static_cast<const Index*>(data);
  int64_t counted = 0;
  int64_t bad = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = indices[i];
    const bool counts = index != ignore_index;
    counted += counts;
    // Negative indices, read as unsigned numbers, are larger than the number of classes.
    bad += counts && static_cast<uint64_t>(index) >= static_cast<uint64_t>(classes);
  }
  return {counted, bad == 0};
}

}  // namespace

TargetCount count_targets(const void* indices, c10::ScalarType dtype, int64_t count,
                          int64_t ignore_index, int64_t classes) {
  switch (dtype) {
    case c10::ScalarType::Long:
      return count_targets_of<int64_t>(indices, count, ignore_index, classes);
    case c10::ScalarType::Int:
      return count_targets_of<int32_t>(indices, count, ignore_index, classes);
    default:
      return count_targets_of<uint8_t>(indices, count, ignore_index, classes);
  }
}

}  // namespace ampfuse::CPU_CAPABILITY
