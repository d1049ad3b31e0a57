// Visits thousands of small tensors, which are scattered over memory. A tensor's header takes four
// cache lines, and that of its storage another. Most of the time is spent waiting for them, so each
// is prefetched some tensors before its turn. More threads would not help: waking them takes as
// long as visiting some hundred tensors, or a time slice of milliseconds if other processes keep
// the cores busy.
#pragma once

#include <ATen/core/Tensor.h>

namespace ampfuse {

/// Prefetches the header of a tensor, about eight tensors before its turn.
inline void prefetch_header(const at::Tensor& tensor) {
  const auto* header = reinterpret_cast<const char*>(tensor.unsafeGetTensorImpl());
  for (int line = 0; line < 4; ++line) __builtin_prefetch(header + 64 * line);
}

/// Prefetches the storage of a tensor, whose address is in the header, about four tensors before
/// its turn.
inline void prefetch_storage(const at::Tensor& tensor) {
  const c10::TensorImpl* header = tensor.unsafeGetTensorImpl();
  if (header->has_storage()) __builtin_prefetch(header->unsafe_storage().unsafeGetStorageImpl());
}

/// Calls visit(t) for each t below `count`, in order. Eight and four turns earlier, it calls
/// touch(t, prefetch), which must call prefetch() for each tensor of index t. The first eight
/// indices are prefetched only in part, or not at all.
template <typename Touch, typename Visit>
void for_each_index(size_t count, const Touch& touch, const Visit& visit) {
  for (size_t t = 0; t < count; ++t) {
    if (t + 8 < count) touch(t + 8, prefetch_header);
    if (t + 4 < count) touch(t + 4, prefetch_storage);
    visit(t);
  }
}

/// Calls visit(t, tensor) for each tensor of a list, and prefetches later ones.
template <typename Visit>
void for_each_tensor(at::TensorList tensors, const Visit& visit) {
  for_each_index(
      tensors.size(), [&](size_t t, const auto& prefetch) { prefetch(tensors[t]); },
      [&](size_t t) { visit(t, tensors[t]); });
}

}  // namespace ampfuse
