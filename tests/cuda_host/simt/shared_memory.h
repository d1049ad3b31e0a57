// The shared arrays of one block, each in its own heap allocation.
#pragma once

#include <cstddef>
#include <vector>

namespace simt::runtime {

inline constexpr std::size_t kStaticSharedLimit = 48 << 10;
// Static plus dynamic shared memory, for compute capability 9.0.
inline constexpr std::size_t kSharedLimit = 227 << 10;

class SharedMemory {
 public:
  explicit SharedMemory(std::size_t dynamic_bytes) : dynamic_bytes_(dynamic_bytes) {}
  ~SharedMemory();
  SharedMemory(const SharedMemory&) = delete;
  SharedMemory& operator=(const SharedMemory&) = delete;

  // Returns the array of the declaration `key`, or nullptr if it would exceed a limit.
  void* find_or_make(const void* key, std::size_t bytes, std::size_t alignment);
  void* dynamic();

 private:
  struct Array {
    const void* key;
    void* data;
  };
  void* find(const void* key) const;
  void* make(const void* key, std::size_t bytes, std::size_t alignment);

  std::vector<Array> arrays_;
  std::size_t static_bytes_ = 0;
  std::size_t dynamic_bytes_;
};

}  // namespace simt::runtime
