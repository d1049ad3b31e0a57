#include "capture.h"

namespace ampfuse {

namespace {

bool (*query)() = nullptr;  // null without CUDA, which leaves nothing to capture

}  // namespace

bool is_capturing() {
  return query != nullptr && query();
}

void set_capture_query(bool (*new_query)()) {
  query = new_query;
}

}  // namespace ampfuse
