// The runtime with correct kernels: launches, blocks, memory and atomics. test_warp.cpp tests warp
// operations; bad_kernels.cpp has the mistakes that must be caught.

#include <array>
#include <cmath>
#include <cstdint>
#include <numeric>
#include <set>
#include <stdexcept>
#include <string>
#include <utility>
#include <vector>

#include "catch.h"
#include "simt/simt.h"

namespace {

template <class Body>
std::string error_of(Body&& body) {
  try {
    body();
  } catch (const simt::Error& error) {
    return error.what();
  }
  return "no error";
}

bool contains(const std::string& text, const std::string& part) {
  return text.find(part) != std::string::npos;
}

__global__ void nothing() {}

__global__ void copy_grid_stride(const float* x, float* y, int64_t n) {
  const int64_t stride = int64_t{gridDim.x} * blockDim.x;
  for (int64_t i = int64_t{blockIdx.x} * blockDim.x + threadIdx.x; i < n; i += stride) y[i] = x[i];
}

__global__ void count_visits(int* visits) {
  const unsigned thread = threadIdx.x + blockDim.x * (threadIdx.y + blockDim.y * threadIdx.z);
  const unsigned block = blockIdx.x + gridDim.x * (blockIdx.y + gridDim.y * blockIdx.z);
  ++visits[block * blockDim.x * blockDim.y * blockDim.z + thread];
}

// Threads without work return before the first barrier.
__global__ void sum_after_early_return(const int* x, int* sum, unsigned n) {
  AMPFUSE_SHARED(int, partial, 256);
  if (threadIdx.x >= n) return;
  partial[threadIdx.x] = x[threadIdx.x];
  for (unsigned width = n / 2; width > 0; width /= 2) {
    __syncthreads();
    if (threadIdx.x < width) partial[threadIdx.x] += partial[threadIdx.x + width];
  }
  if (threadIdx.x == 0) *sum = partial[0];
}

template <class T>
__global__ void reverse_in_dynamic_shared(T* x) {
  AMPFUSE_DYNAMIC_SHARED(T, buffer);
  buffer[threadIdx.x] = x[threadIdx.x];
  __syncthreads();
  x[threadIdx.x] = buffer[blockDim.x - 1 - threadIdx.x];
}

template <class T>
__device__ float* array_of_instantiation() {
  AMPFUSE_SHARED(float, array, 4);
  return array;
}

__global__ void collect_arrays(std::array<float*, 3>* arrays) {
  AMPFUSE_SHARED(float, own, 4);
  arrays[threadIdx.x] = {own, array_of_instantiation<int>(), array_of_instantiation<float>()};
}

__global__ void leave_and_look(float* seen) {
  AMPFUSE_SHARED(float, array, 1);
  if (threadIdx.x == 0) {
    seen[blockIdx.x] = array[0];
    array[0] = 1;
  }
}

struct Totals {
  int sum = 0;
  unsigned wrapped = 0, exchanged = 0;
  unsigned long long wide = 0;
  float real = 0;
  double precise = 0;
};

__global__ void total(Totals* totals, int* first) {
  const int i = static_cast<int>(blockIdx.x * blockDim.x + threadIdx.x);
  atomicAdd(&totals->sum, i);
  atomicAdd(&totals->wide, 1ull << 32);
  atomicAdd(&totals->real, 0.5f);
  atomicAdd(&totals->precise, 0.25);
  atomicInc(&totals->wrapped, 9);
  if (atomicExch(&totals->exchanged, 1) == 0) *first = i;
}

struct Large {
  std::array<char, 32000> bytes;
  int value;
};

__global__ void read_large(Large large, int* out) {
  out[threadIdx.x] = large.value;
}

__global__ void throw_from(unsigned thrower) {
  __syncthreads();
  if (threadIdx.x == thrower) throw std::runtime_error("from a kernel");
  __syncthreads();
}

__global__ void trap() {
  if (threadIdx.x == 5) __trap();
}

// Each block of a cluster sends the index of its number to all blocks of the cluster.
__global__ void all_to_all(double* received) {
  AMPFUSE_SHARED(double, numbers, 3);
  AMPFUSE_SHARED(ampfuse::Inbox, inbox, 1);
  if (threadIdx.x == 0) ampfuse::open_inbox(inbox);
  ampfuse::sync_cluster();
  if (threadIdx.x == 1) ampfuse::expect_bytes(inbox, sizeof numbers);
  const int rank = static_cast<int>(threadIdx.x);
  if (rank < ampfuse::cluster_blocks())
    ampfuse::send(rank, &numbers[ampfuse::cluster_rank()], blockIdx.x, inbox);
  ampfuse::wait_for_bytes(inbox, false);
  const unsigned block = blockIdx.y * gridDim.x + blockIdx.x;
  if (threadIdx.x < 3) received[block * 3 + threadIdx.x] = numbers[threadIdx.x];
}

__global__ void record_order(unsigned* order, unsigned* count) {
  order[atomicAdd(count, 1)] = threadIdx.x;
}

}  // namespace

TEST_CASE("a grid-stride loop covers every element") {
  simt::for_each_schedule([] {
    std::vector<float> x(1000), y(1000);
    std::iota(x.begin(), x.end(), 0.0f);
    simt::launch(copy_grid_stride, 3, 64, 0, x.data(), y.data(), 1000);
    CHECK(x == y);
  });
}

TEST_CASE("three-dimensional grids and blocks visit every index once") {
  simt::for_each_schedule([] {
    std::vector<int> visits(2 * 3 * 4 * 5 * 6 * 7);
    simt::launch(count_visits, dim3(2, 3, 4), dim3(5, 6, 7), 0, visits.data());
    CHECK(visits == std::vector<int>(visits.size(), 1));
  });
}

TEST_CASE("threads may return before the first barrier") {
  simt::for_each_schedule([] {
    std::vector<int> x(128, 3);
    int sum = 0;
    simt::launch(sum_after_early_return, 1, 256, 0, x.data(), &sum, 128);
    CHECK(sum == 384);
  });
}

TEST_CASE("dynamic shared memory has the size of the launch") {
  simt::for_each_schedule([] {
    std::vector<double> x = {1, 2, 3, 4, 5};
    simt::launch(reverse_in_dynamic_shared<double>, 1, 5, 5 * sizeof(double), x.data());
    CHECK(x == std::vector<double>{5, 4, 3, 2, 1});
  });
}

TEST_CASE("each declaration and instantiation has one shared array for all threads") {
  std::array<std::array<float*, 3>, 2> arrays;
  simt::launch(collect_arrays, 1, 2, 0, arrays.data());
  CHECK(arrays[0] == arrays[1]);
  CHECK(std::set<float*>(arrays[0].begin(), arrays[0].end()).size() == 3);
}

TEST_CASE("shared memory starts as NaN in every block") {
  std::vector<float> seen(3);
  simt::launch(leave_and_look, 3, 4, 0, seen.data());
  for (float value : seen) CHECK(std::isnan(value));
}

TEST_CASE("atomics of all blocks add up") {
  simt::for_each_schedule([] {
    Totals totals;
    int first = -1;
    simt::launch(total, 4, 32, 0, &totals, &first);
    CHECK(totals.sum == 127 * 64);
    CHECK(totals.wide == 128ull << 32);
    CHECK(totals.real == 64);
    CHECK(totals.precise == 32);
    CHECK(totals.wrapped == 128 % 10);
    CHECK(first >= 0);  // written by one thread
  });
}

TEST_CASE("arguments are copied by value, up to CUDA's 32,764 bytes") {
  Large large = {};
  large.value = 7;
  std::vector<int> out(256);
  simt::launch(read_large, 1, 256, 0, large, out.data());
  CHECK(out == std::vector<int>(256, 7));
}

TEST_CASE("blocks of a cluster are neighbours in x, and exchange numbers") {
  simt::for_each_schedule([] {
    std::vector<double> received(2 * 4 * 3 * 3, -1);
    simt::launch_clusters(all_to_all, dim3(12, 2), 3, 64, 0, received.data());
    std::vector<double> expected;
    for (int row = 0; row < 2; ++row) {
      for (int block = 0; block < 12; ++block) {
        for (int sender = 0; sender < 3; ++sender) expected.push_back(block / 3 * 3 + sender);
      }
    }
    CHECK(received == expected);
  });
}

TEST_CASE("a schedule determines the order of threads") {
  using Order = simt::Schedule::Order;
  const auto order_under = [](const simt::Schedule& schedule) {
    const simt::ScopedSchedule scope(schedule);
    std::vector<unsigned> order(8);
    unsigned count = 0;
    simt::launch(record_order, 1, 8, 0, order.data(), &count);
    return order;
  };
  const std::vector<unsigned> forward = {0, 1, 2, 3, 4, 5, 6, 7};
  CHECK(order_under({Order::forward}) == forward);
  CHECK(order_under({Order::reverse}) == std::vector<unsigned>(forward.rbegin(), forward.rend()));
  CHECK(order_under({Order::random, 1}) == order_under({Order::random, 1}));
  CHECK(order_under({Order::random, 1}) != order_under({Order::random, 2}));
}

TEST_CASE("launches that CUDA refuses are refused") {
  const auto error = [](dim3 grid, dim3 block, std::size_t shared_bytes) {
    return error_of([&] { simt::launch(nothing, grid, block, shared_bytes); });
  };
  CHECK(error(1, 1024, 0) == "no error");
  CHECK(contains(error(1, 1025, 0), "1025 threads per block"));
  CHECK(contains(error(1, dim3(32, 32, 2), 0), "2048 threads per block"));
  CHECK(contains(error(1, dim3(1, 1, 65), 0), "65 deep"));
  CHECK(contains(error(dim3(1, 65536), 1, 0), "grid"));
  CHECK(contains(error(0, 1, 0), "empty"));
  CHECK(contains(error(1, 1, 300000), "300000 bytes"));
  const auto cluster_error = [](dim3 grid, unsigned cluster) {
    return error_of([&] { simt::launch_clusters(nothing, grid, cluster, 1, 0); });
  };
  CHECK(cluster_error(8, 8) == "no error");
  CHECK(contains(cluster_error(16, 16), "clusters of 16 blocks"));
  CHECK(contains(cluster_error(9, 2), "not a multiple of the cluster"));
}

TEST_CASE("launch throws the exception of a kernel, and the next launch works") {
  simt::for_each_schedule([] {
    CHECK_THROWS_AS(simt::launch(throw_from, 2, 64, 0, 40), std::runtime_error);
    simt::launch(throw_from, 2, 64, 0, 64);
  });
  CHECK(contains(error_of([] { simt::launch(trap, 1, 32, 0); }), "__trap"));
  CHECK(contains(error_of([] { simt::launch(trap, 1, 32, 0); }), "thread (5,0,0)"));
}
