#include "simt/simt.h"

#include "cuda/multi_tensor.cuh"
#include "cuda/vectorized.cuh"

#include "catch.h"
#include "tensor_lists.h"

namespace {

using ampfuse::Access;
using ampfuse::TableChunk;

// Six columns, as fused_adam has, and small chunks.
using Table = ampfuse::TensorTable<6, 16>;
using Wide = ampfuse::TensorTable<1, 8192>;

// Checks that the tables of a list have each of its elements in exactly one chunk, and returns
// their number.
int tables_of(const std::vector<int64_t>& sizes) {
  std::vector<int64_t> found(sizes.size(), 0);
  std::vector<int64_t> next(sizes.size(), 0);  // expected offset of a tensor's next chunk
  int tables = 0;
  auto builder = ampfuse::build_tables<Table>([&](const Table& table) {
    ++tables;
    for (uint32_t c = 0; c < table.chunks(); ++c) {
      const TableChunk at = ampfuse::find_chunk(table, c);
      const auto tensor = reinterpret_cast<uintptr_t>(table.at(5, at.tensor)) - 1;
      REQUIRE(at.number * Table::kChunk == next[tensor]);
      next[tensor] += Table::kChunk;
      found[tensor] += at.size;
    }
  });
  for (size_t t = 0; t < sizes.size(); ++t) {
    void* const name = reinterpret_cast<void*>(t + 1);
    builder.add({name, name, name, name, name, name}, sizes[t]);
  }
  builder.flush();
  CHECK(found == sizes);
  return tables;
}

__global__ void count_chunks_kernel(const __grid_constant__ Table table, int* visits) {
  ampfuse::for_each_chunk(table, [&](uint32_t chunk, const TableChunk&, int lane) {
    if (lane == 0) atomicAdd(visits + chunk, 1);
  });
}

__global__ void add_one_kernel(uint16_t* data, int size) {
  ampfuse::visit_elements<Access::kReadWrite>(data, size, static_cast<int>(threadIdx.x),
                                              [](uint16_t& x) { ++x; });
}

}  // namespace

TEST_CASE("every element of a list is in exactly one chunk") {
  CHECK(tables_of({0, 1, 15, 16, 17, 0, 0, 1000, 32, 0}) == 1);
  CHECK(tables_of({}) == 0);
}

TEST_CASE("a table with six columns holds 600 tensors and fits in kernel arguments") {
  STATIC_REQUIRE(Table::kCapacity >= 600);
  STATIC_REQUIRE(sizeof(Table) + ampfuse::kOtherArgumentBytes <= ampfuse::kMaxArgumentBytes);
  CHECK(tables_of(std::vector<int64_t>(600, 20)) == 1);
  CHECK(tables_of(std::vector<int64_t>(2 * Table::kCapacity + 1, 3)) == 3);
}

TEST_CASE("offsets of tensors beyond 2^31 elements do not wrap") {
  auto builder = ampfuse::build_tables<Wide>([](const Wide& table) {
    const TableChunk last = ampfuse::find_chunk(table, table.chunks() - 1);
    CHECK(last.number * Wide::kChunk == int64_t{1} << 33);
    CHECK(last.size == 5);
    const auto address = reinterpret_cast<uintptr_t>(ampfuse::chunk_data<double>(table, 0, last));
    CHECK(address == (uintptr_t{1} << 36) + 16);
  });
  builder.add({reinterpret_cast<void*>(16)}, (int64_t{1} << 33) + 5);
  builder.flush();
}

TEST_CASE("chunks beyond the 32-bit count of a table go to another table") {
  const int64_t half = (int64_t{1} << 31) * 8192;
  std::vector<uint32_t> chunks;
  auto builder =
      ampfuse::build_tables<Wide>([&](const Wide& table) { chunks.push_back(table.chunks()); });
  builder.add({nullptr}, half);
  builder.add({nullptr}, half);
  builder.flush();
  CHECK(chunks == std::vector<uint32_t>{1u << 31, 1u << 31});
}

TEST_CASE("each chunk is visited once for every grid size") {
  const int grid = GENERATE(1, 3, 4);  // 8, 24 or 32 warps for 25 chunks
  simt::for_each_schedule([grid] {
    std::vector<int> visits(25, 0);
    auto builder = ampfuse::build_tables<Table>([&](const Table& table) {
      REQUIRE(table.chunks() == 25);
      simt::launch(count_chunks_kernel, grid, ampfuse::kThreads, 0, table, visits.data());
    });
    builder.add({}, 24 * 16 - 3);
    builder.add({}, 0);
    builder.flush();
    CHECK(visits == std::vector<int>(25, 1));
  });
}

TEST_CASE("visit_elements visits each element once for every alignment and size") {
  const int offset = GENERATE(range(0, 8));
  for (int size = 0; size < 1200; size = size < 40 ? size + 1 : size + 97) {
    const FakeTensor<uint16_t> tensor(size, offset);
    for (int i = 0; i < size; ++i) tensor.data()[i] = static_cast<uint16_t>(i);
    simt::launch(add_one_kernel, 1, ampfuse::kWarp, 0, tensor.data(), size);
    for (int i = 0; i < size; ++i) REQUIRE(tensor.data()[i] == i + 1);
  }
}

TEST_CASE("a grid has at least one block and no more blocks than are resident") {
  CHECK(ampfuse::grid_size(0, 132) == 1);
  CHECK(ampfuse::grid_size(1, 132) == 1);
  CHECK(ampfuse::grid_size(9, 132) == 2);
  CHECK(ampfuse::grid_size(int64_t{1} << 40, 132) == 132 * ampfuse::kBlocksPerMultiprocessor);
}
