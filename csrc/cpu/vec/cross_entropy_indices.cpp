#include "cross_entropy_indices.h"

namespace ampfuse::CPU_CAPABILITY {

namespace {

template <typename Index>
ClassIndices look_at(const void* data, int64_t count, int64_t ignore_index, int64_t classes) {
  const auto* const indices = static_cast<const Index*>(data);
  int64_t counting = 0;
  int64_t bad = 0;
  for (int64_t i = 0; i < count; ++i) {
    const int64_t index = indices[i];
    const bool counts = index != ignore_index;
    counting += counts;
    // Negative indices, read as unsigned numbers, are larger than the number of classes.
    bad += counts && static_cast<uint64_t>(index) >= static_cast<uint64_t>(classes);
  }
  return {counting, bad == 0};
}

}  // namespace

ClassIndices look_at_indices(const void* indices, c10::ScalarType dtype, int64_t count,
                             int64_t ignore_index, int64_t classes) {
  switch (dtype) {
    case c10::ScalarType::Long:
      return look_at<int64_t>(indices, count, ignore_index, classes);
    case c10::ScalarType::Int:
      return look_at<int32_t>(indices, count, ignore_index, classes);
    default:
      return look_at<uint8_t>(indices, count, ignore_index, classes);
  }
}

}  // namespace ampfuse::CPU_CAPABILITY
