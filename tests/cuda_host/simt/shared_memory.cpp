#include "simt/shared_memory.h"

#include <algorithm>
#include <cstdlib>
#include <cstring>
#include <new>

#include "simt/fiber.h"

namespace simt::runtime {

SharedMemory::~SharedMemory() {
  const IgnoreScope ignore;
  for (const Array& array : arrays_) std::free(array.data);
}

void* SharedMemory::find_or_make(const void* key, std::size_t bytes, std::size_t alignment) {
  if (void* data = find(key)) return data;
  static_bytes_ += bytes;
  if (static_bytes_ > kStaticSharedLimit || static_bytes_ + dynamic_bytes_ > kSharedLimit)
    return nullptr;
  return make(key, bytes, alignment);
}

void* SharedMemory::dynamic() {
  void* data = find(&dynamic_bytes_);
  return data ? data : make(&dynamic_bytes_, dynamic_bytes_, 1);
}

void* SharedMemory::find(const void* key) const {
  for (const Array& array : arrays_)
    if (array.key == key) return array.data;
  return nullptr;
}

void* SharedMemory::make(const void* key, std::size_t bytes, std::size_t alignment) {
  constexpr std::size_t kLeastAlignment = 16;  // dynamic shared memory must allow vector accesses
  const IgnoreScope ignore;
  void* data = nullptr;
  if (posix_memalign(&data, std::max(alignment, kLeastAlignment), bytes) != 0)
    throw std::bad_alloc();
  std::memset(data, 0xff, bytes);  // a NaN in every floating-point type
  arrays_.push_back({key, data});
  return data;
}

}  // namespace simt::runtime
