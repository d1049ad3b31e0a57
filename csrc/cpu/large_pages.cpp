#include "large_pages.h"

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>

namespace ampfuse {

void prefer_large_pages([[maybe_unused]] const at::Tensor& fresh) {
#if defined(__linux__) && defined(MADV_HUGEPAGE)
  constexpr uintptr_t kHolds = 4000000;  // a whole large page, wherever it begins
  constexpr uintptr_t kPage = 4096;
  if (fresh.nbytes() < kHolds) return;
  const auto begin = reinterpret_cast<uintptr_t>(fresh.mutable_data_ptr());
  const uintptr_t first = (begin + kPage - 1) / kPage * kPage;
  const uintptr_t size = (begin + fresh.nbytes() - first) / kPage * kPage;
  // A wish: where it is not granted, all stays as it was.
  static_cast<void>(madvise(reinterpret_cast<void*>(first), size, MADV_HUGEPAGE));
#endif
}

}  // namespace ampfuse
