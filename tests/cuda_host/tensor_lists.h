// Lists of fake tensors for multi-tensor kernels.
#pragma once

#include "numbers.h"

// An array whose type is fixed at compile time; see Numbers.
template <typename T>
struct FakeTensor {
  std::unique_ptr<T[]> buffer;
  int64_t offset;
  int64_t size;

  FakeTensor(int64_t size, int64_t offset)
      : buffer(new T[offset + size]), offset(offset), size(size) {}

  T* data() const { return buffer.get() + offset; }
};

template <typename T>
FakeTensor<T> random_tensor(int64_t size, int64_t offset, uint32_t seed) {
  FakeTensor<T> tensor(size, offset);
  const std::vector<double> values = random_values(size, seed);
  for (int64_t i = 0; i < size; ++i) tensor.data()[i] = as_element<T>(values[i]);
  return tensor;
}

// Returns tensors with sizes on both sides of each unit of a kernel: no element, the single
// elements before the first 16-byte boundary (at most 7), a pack per lane, four packs per lane (256
// to 1024 elements, depending on dtype), a chunk, several chunks. Offsets cycle through all
// misalignments.
template <typename T>
std::vector<FakeTensor<T>> boundary_tensors() {
  const int64_t sizes[] = {0,   1,   7,    8,    31,   32,   33,   127,  128,
                           255, 256, 1023, 1024, 1025, 8191, 8192, 8193, 20000};
  std::vector<FakeTensor<T>> tensors;
  uint32_t seed = 0;
  for (const int64_t size : sizes) {
    tensors.push_back(random_tensor<T>(size, seed % (16 / sizeof(T)), seed));
    ++seed;
  }
  return tensors;
}
