#include "capture.h"

namespace ampfuse {

namespace {

bool (*query)() = nullptr;  // null in a build without CUDA, where nothing is captured

}  // namespace

bool is_capturing() {
  return query != nullptr && query();
}

void set_capture_query(bool (*new_query)()) {
  query = new_query;
}

}  // namespace ampfuse
