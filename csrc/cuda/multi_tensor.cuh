// A list of tensors as one kernel argument, and the search for a chunk in it.
//
// A TensorTable is passed by value: it needs no copy to the device and no memory to keep alive, and
// a CUDA graph that captures the launch contains it. Since CUDA 12.1 arguments may take 32,764
// bytes, enough for 600 tensors with 6 pointers each; longer lists take several launches. Chunks
// are found by a binary search over prefix sums, not in a table of blocks, so the grid may have any
// size and one launch serves any number of elements.
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>

#include "../math/host_device.h"
#include "launch.cuh"

namespace ampfuse {

// The most bytes that all arguments of a kernel may take, and the bytes reserved for those besides
// the table.
inline constexpr size_t kMaxArgumentBytes = 32764;
inline constexpr size_t kOtherArgumentBytes = 256;

// A table of pointers, `columns` per tensor: kColumns, or more in a table of fewer tensors. All
// columns of a tensor have the same number of elements, which are cut into chunks of `kChunk`.
template <int kColumnCount, int kChunkSize>
struct TensorTable {
  static constexpr int kColumns = kColumnCount;
  static constexpr int kChunk = kChunkSize;
  static_assert(kChunk < 65536, "the size of a chunk must fit in 16 bits");

  // A tensor takes its pointers, 4 bytes of prefix sum and 2 bytes of rest. 16 bytes are reserved
  // for both counts and the alignment.
  static constexpr int kCapacity =
      static_cast<int>((kMaxArgumentBytes - kOtherArgumentBytes - 16) / (kColumns * 8 + 6));

  void* data[kColumns * kCapacity];  // those of tensor t begin at t * columns
  uint32_t chunks_until[kCapacity];  // total number of chunks of tensors 0 to i, including i
  uint16_t rest[kCapacity];          // number of elements in the last chunk of tensor i
  uint16_t count;
  uint16_t columns;

  AMPFUSE_HOST_DEVICE void* at(int column, int tensor) const {
    return data[tensor * columns + column];
  }
  AMPFUSE_HOST_DEVICE uint32_t chunks() const { return count == 0 ? 0 : chunks_until[count - 1]; }
};

// One chunk of one tensor.
struct TableChunk {
  int tensor;      // index of the tensor in the table
  int64_t number;  // index of the chunk within the tensor
  int64_t chunks;  // number of chunks of the tensor
  int size;        // in elements
};

// Returns a pointer to a chunk's elements in one of the tensor's columns.
template <typename T, typename Table>
AMPFUSE_HOST_DEVICE T* chunk_data(const Table& table, int column, const TableChunk& chunk) {
  return static_cast<T*>(table.at(column, chunk.tensor)) + chunk.number * Table::kChunk;
}

template <typename Table>
AMPFUSE_HOST_DEVICE TableChunk find_chunk(const Table& table, uint32_t chunk) {
  // Find the first tensor with chunks_until > chunk. This takes 9 steps for 512 tensors. All lanes
  // of a warp read the same addresses, which the constant cache serves.
  int low = 0;
  int high = table.count - 1;
  while (low < high) {
    const int middle = (low + high) / 2;
    if (table.chunks_until[middle] > chunk) {
      high = middle;
    } else {
      low = middle + 1;
    }
  }
  const uint32_t begin = low == 0 ? 0 : table.chunks_until[low - 1];
  const uint32_t end = table.chunks_until[low];
  return {low, int64_t(chunk - begin), int64_t(end - begin),
          chunk + 1 == end ? table.rest[low] : Table::kChunk};
}

// Calls visit(index of the chunk in the table, TableChunk, lane) once per chunk, from all lanes of
// one warp. The warps of the grid take chunks in turn.
template <typename Table, typename Visit>
__device__ __forceinline__ void for_each_chunk(const Table& table, Visit visit) {
  const int lane = static_cast<int>(threadIdx.x) % kWarp;
  const uint32_t warps = gridDim.x * kWarpsPerBlock;
  const uint32_t chunks = table.chunks();
  for (uint32_t chunk = blockIdx.x * kWarpsPerBlock + threadIdx.x / kWarp; chunk < chunks;
       chunk += warps) {
    visit(chunk, find_chunk(table, chunk), lane);
  }
}

// Fills tables on the host. Calls launch(table) when a table is full, and for the last table in
// flush().
template <typename Table, typename Launch>
class TableBuilder {
 public:
  explicit TableBuilder(Launch launch, int columns)
      : launch_(launch),
        capacity_(std::min(Table::kCapacity, Table::kCapacity * Table::kColumns / columns)) {
    table_.count = 0;
    table_.columns = static_cast<uint16_t>(columns);
  }

  void add(const std::array<void*, Table::kColumns>& data, int64_t numel) {
    add_columns(data.data(), numel);
  }

  // Adds a tensor with the table's columns. A tensor without elements gets one empty chunk, so that
  // kernels need no special case for it.
  void add_columns(void* const* data, int64_t numel) {
    const int64_t chunks = numel == 0 ? 1 : (numel + Table::kChunk - 1) / Table::kChunk;
    // A table counts chunks in 32 bits, enough for 2⁴⁵ elements in chunks of 8192.
    if (table_.count == capacity_ || table_.chunks() + chunks > UINT32_MAX) flush();
    const int i = table_.count;
    std::copy_n(data, table_.columns, table_.data + i * table_.columns);
    table_.chunks_until[i] = static_cast<uint32_t>(table_.chunks() + chunks);
    table_.rest[i] = static_cast<uint16_t>(numel - (chunks - 1) * Table::kChunk);
    ++table_.count;
  }

  void flush() {
    if (table_.count == 0) return;
    launch_(static_cast<const Table&>(table_));
    table_.count = 0;
  }

 private:
  Table table_;
  Launch launch_;
  int capacity_;
};

template <typename Table, typename Launch>
TableBuilder<Table, Launch> build_tables(Launch launch, int columns = Table::kColumns) {
  return TableBuilder<Table, Launch>(launch, columns);
}

}  // namespace ampfuse
