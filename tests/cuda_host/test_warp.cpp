// Warp operations in which all lanes take part, compared with values computed for each lane.

#include <cstdint>
#include <vector>

#include "catch.h"
#include "simt/simt.h"

namespace {

constexpr unsigned kFullMask = 0xffffffff;

enum class Shuffle { index, up, down, exclusive_or };

template <class T>
__global__ void shuffle(Shuffle kind, T* values, int operand, int width) {
  T& value = values[threadIdx.x];
  if (kind == Shuffle::index) value = __shfl_sync(kFullMask, value, operand, width);
  if (kind == Shuffle::up) value = __shfl_up_sync(kFullMask, value, operand, width);
  if (kind == Shuffle::down) value = __shfl_down_sync(kFullMask, value, operand, width);
  if (kind == Shuffle::exclusive_or) value = __shfl_xor_sync(kFullMask, value, operand, width);
}

// Returns the lane whose value `lane` receives, by the tables of the CUDA programming guide.
int expected_source(Shuffle kind, int lane, int operand, int width) {
  const int start = lane / width * width, end = start + width;
  switch (kind) {
    case Shuffle::index:
      return start + operand % width;
    case Shuffle::up:
      return lane - operand >= start ? lane - operand : lane;
    case Shuffle::down:
      return lane + operand < end ? lane + operand : lane;
    case Shuffle::exclusive_or:
      return (lane ^ operand) < end ? lane ^ operand : lane;
  }
  return -1;
}

template <class T>
void check_shuffles(T scale) {
  for (const Shuffle kind : {Shuffle::index, Shuffle::up, Shuffle::down, Shuffle::exclusive_or}) {
    for (const int width : {1, 2, 8, 32}) {
      for (const int operand : {0, 1, 5, 16, 31}) {
        std::vector<T> values(64), expected(64);
        for (int i = 0; i < 64; ++i) {
          values[i] = static_cast<T>(i) * scale;
          const int source = i / 32 * 32 + expected_source(kind, i % 32, operand, width);
          expected[i] = static_cast<T>(source) * scale;
        }
        simt::launch(shuffle<T>, 1, 64, 0, kind, values.data(), operand, width);
        CHECK(values == expected);
      }
    }
  }
}

__global__ void votes(unsigned* out) {
  const bool odd = threadIdx.x % 2 != 0;
  const unsigned ballot = __ballot_sync(kFullMask, odd);
  const int any = __any_sync(kFullMask, threadIdx.x == 3), none = __any_sync(kFullMask, 0);
  const int all = __all_sync(kFullMask, 2), not_all = __all_sync(kFullMask, odd);
  out[threadIdx.x] = ballot + (any == 1) + (none == 0) + (all == 1) + (not_all == 0);
}

// The two halves of a warp run different code, each with its own mask.
__global__ void sum_halves(int* values) {
  const bool upper = threadIdx.x >= 16;
  const unsigned mask = upper ? 0xffff0000 : 0x0000ffff;
  int value = values[threadIdx.x];
  if (upper)
    for (int i = 0; i < 3; ++i) value = __shfl_xor_sync(mask, value, 1);
  for (int delta = 8; delta > 0; delta /= 2) value += __shfl_xor_sync(mask, value, delta);
  values[threadIdx.x] = value;
}

// Lanes exchange values through shared memory, ordered only by __syncwarp.
__global__ void rotate(int* values) {
  AMPFUSE_SHARED(int, buffer, 32);
  for (int round = 0; round < 3; ++round) {
    buffer[threadIdx.x] = values[threadIdx.x];
    __syncwarp();
    values[threadIdx.x] = buffer[(threadIdx.x + 1) % 32];
    __syncwarp();
  }
}

__global__ void block_sum(const float* x, float* sums, int n) {
  AMPFUSE_SHARED(float, partial, 32);
  const float* row = x + blockIdx.x * n;
  float sum = 0;
  for (unsigned i = threadIdx.x; i < static_cast<unsigned>(n); i += blockDim.x) sum += row[i];
  for (int delta = 16; delta > 0; delta /= 2) sum += __shfl_down_sync(kFullMask, sum, delta);
  if (threadIdx.x % 32 == 0) partial[threadIdx.x / 32] = sum;
  __syncthreads();
  if (threadIdx.x >= 32) return;
  sum = threadIdx.x < blockDim.x / 32 ? partial[threadIdx.x] : 0;
  for (int delta = 16; delta > 0; delta /= 2) sum += __shfl_down_sync(kFullMask, sum, delta);
  if (threadIdx.x == 0) sums[blockIdx.x] = sum;
}

__global__ void active(unsigned* out) {
  out[threadIdx.x] = __activemask();
}

__global__ void bad_width(int* out) {
  out[threadIdx.x] = __shfl_sync(kFullMask, 0, 0, 12);
}

__global__ void full_mask(unsigned* out) {
  out[threadIdx.x] = __ballot_sync(kFullMask, 1);
}

}  // namespace

TEST_CASE("shuffles of every kind and width move 4 and 8 bytes") {
  simt::for_each_schedule([] {
    check_shuffles<float>(0.5f);
    check_shuffles<int64_t>(int64_t{1} << 40);
  });
}

TEST_CASE("votes cover all lanes") {
  simt::for_each_schedule([] {
    std::vector<unsigned> out(32);
    simt::launch(votes, 1, 32, 0, out.data());
    CHECK(out == std::vector<unsigned>(32, 0xaaaaaaaa + 4));
  });
}

TEST_CASE("disjoint masks work independently") {
  simt::for_each_schedule([] {
    std::vector<int> values(32, 1);
    simt::launch(sum_halves, 1, 32, 0, values.data());
    CHECK(values == std::vector<int>(32, 16));
  });
}

TEST_CASE("__syncwarp orders memory between lanes") {
  simt::for_each_schedule([] {
    std::vector<int> values(32), expected(32);
    for (int i = 0; i < 32; ++i) {
      values[i] = i;
      expected[i] = (i + 3) % 32;
    }
    simt::launch(rotate, 1, 32, 0, values.data());
    CHECK(values == expected);
  });
}

TEST_CASE("a block reduction sums each row") {
  simt::for_each_schedule([] {
    const int rows = 3, columns = 1000;
    const std::vector<float> x(rows * columns, 0.25f);
    for (const unsigned threads : {32, 96, 512}) {
      std::vector<float> sums(rows);
      simt::launch(block_sum, rows, threads, 0, x.data(), sums.data(), columns);
      CHECK(sums == std::vector<float>(rows, 250));
    }
  });
}

TEST_CASE("__activemask contains only the calling lane") {
  std::vector<unsigned> out(33);
  simt::launch(active, 1, 33, 0, out.data());
  CHECK(out[5] == 1u << 5);
  CHECK(out[32] == 1u);
}

TEST_CASE("masks beyond the block and a shuffle width of 12 are refused") {
  std::vector<unsigned> out(48);
  CHECK_THROWS_AS(simt::launch(full_mask, 1, 48, 0, out.data()), simt::Error);
  CHECK_THROWS_AS(simt::launch(bad_width, 1, 32, 0, reinterpret_cast<int*>(out.data())),
                  simt::Error);
}
