#include "fresh_memory.h"

#include <ATen/Parallel.h>

#if defined(__linux__)
#include <sys/mman.h>
#endif

#include <cstdint>

namespace ampfuse {

namespace {

constexpr int64_t kPage = 4096;
constexpr int64_t kFewestBytes = 256 << 10;             // a call for fewer is not worth it
constexpr int64_t kFewestBytesForLargePages = 4 << 20;  // they contain a whole page of 2 MiB
constexpr int64_t kCachedBytes = 16 << 20;  // more leaves the cache before it is written

// Both kinds of advice are optional: if the system refuses one, nothing changes.
[[maybe_unused]] void advise(char* begin, int64_t size, int advice) {
#if defined(__linux__)
  static_cast<void>(madvise(begin, static_cast<size_t>(size), advice));
#endif
}

}  // namespace

void prepare_fresh_memory(const at::Tensor& fresh) {
  const auto size = static_cast<int64_t>(fresh.nbytes());
  if (!fresh.is_cpu() || size < kFewestBytes) return;
  auto* const data = static_cast<char*>(fresh.mutable_data_ptr());
  const int64_t past = static_cast<int64_t>(reinterpret_cast<uintptr_t>(data) % kPage);
  [[maybe_unused]] char* const first = data + (past == 0 ? 0 : kPage - past);
  [[maybe_unused]] const int64_t pages = (data + size - first) / kPage;
#if defined(MADV_HUGEPAGE)
  if (size >= kFewestBytesForLargePages) advise(first, pages * kPage, MADV_HUGEPAGE);
#endif
#if defined(MADV_POPULATE_WRITE)
  if (size >= kCachedBytes) return;
  at::parallel_for(0, pages, kFewestBytes / kPage, [&](int64_t begin, int64_t end) {
    advise(first + begin * kPage, (end - begin) * kPage, MADV_POPULATE_WRITE);
  });
#endif
}

}  // namespace ampfuse
