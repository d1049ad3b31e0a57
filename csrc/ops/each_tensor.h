// Thousands of small tensors are scattered over memory: a tensor's header is four cache lines, and
// that of its storage another. Looking at them is nearly all waiting, so that threads share it, and
// each has its CPU bring later ones into the cache meanwhile.
#pragma once

#include <ATen/Parallel.h>
#include <ATen/core/Tensor.h>

#include <atomic>

namespace ampfuse {

/// Of a tensor that will be looked at some eight tensors later.
inline void prefetch_header(const at::Tensor& tensor) {
  const auto* header = reinterpret_cast<const char*>(tensor.unsafeGetTensorImpl());
  for (int line = 0; line < 4; ++line) __builtin_prefetch(header + 64 * line);
}

/// Of one that will be some four tensors later: its address stands in the header.
inline void prefetch_storage(const at::Tensor& tensor) {
  const c10::TensorImpl* header = tensor.unsafeGetTensorImpl();
  if (header->has_storage()) __builtin_prefetch(header->unsafe_storage().unsafeGetStorageImpl());
}

/// Whether threads may look at tensors like this one. Not at those that ask Python for their
/// properties, whose lock this thread holds, perhaps, and waits for them.
inline bool is_for_threads(const at::Tensor& tensor) {
  const c10::DispatchKeySet keys = tensor.key_set();
  return !keys.has_any(c10::python_ks) && !keys.has_backend(c10::BackendComponent::MetaBit);
}

/// Calls visit(t) for t < count from torch's threads, and prefetch(t, use) for those to come. Where
/// visits throw, the error is that of the first t: whichever thread met one, the calls are repeated
/// in order. `first`: one of the tensors, or null where there is none.
template <typename Prefetch, typename Visit>
void for_each_index(size_t count, const at::Tensor* first, const Prefetch& prefetch,
                    const Visit& visit) {
  std::atomic<bool> refused = false;
  if (first != nullptr && first->defined() && !is_for_threads(*first)) {
    for (size_t t = 0; t < count; ++t) visit(t);
    return;
  }
  // Up to a microsecond each: a thread gets 0.1 ms of it.
  at::parallel_for(0, static_cast<int64_t>(count), 128, [&](int64_t begin, int64_t end) {
    try {
      for (auto t = static_cast<size_t>(begin); t < static_cast<size_t>(end); ++t) {
        if (t + 8 < count) prefetch(t + 8, prefetch_header);
        if (t + 4 < count) prefetch(t + 4, prefetch_storage);
        visit(t);
      }
    } catch (...) {
      refused = true;
    }
  });
  for (size_t t = 0; refused && t < count; ++t) visit(t);
}

/// The same for one list.
template <typename Visit>
void for_each_tensor(at::TensorList tensors, const Visit& visit) {
  for_each_index(
      tensors.size(), tensors.empty() ? nullptr : &tensors[0],
      [&](size_t t, const auto& prefetch) { prefetch(tensors[t]); },
      [&](size_t t) { visit(t, tensors[t]); });
}

}  // namespace ampfuse
