// The runtime with correct kernels. Barriers, shuffles and votes are tested by the tests of
// kernels; bad_kernels.cpp has the mistakes that must be caught.

#include <cmath>
#include <stdexcept>
#include <string>
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

__global__ void nothing() {}

__global__ void leave_and_look(float* seen) {
  AMPFUSE_SHARED(float, array, 1);
  if (threadIdx.x == 0) {
    seen[blockIdx.x] = array[0];
    array[0] = 1;
  }
}

__global__ void throw_from(unsigned thrower) {
  __syncthreads();
  if (threadIdx.x == thrower) throw std::runtime_error("from a kernel");
  __syncthreads();
}

__global__ void trap() {
  if (threadIdx.x == 5) __trap();
}

__global__ void record_order(unsigned* order, unsigned* count) {
  order[atomicAdd(count, 1)] = threadIdx.x;
}

}  // namespace

TEST_CASE("shared memory starts as NaN in every block") {
  std::vector<float> seen(3);
  simt::launch(leave_and_look, 3, 4, 0, seen.data());
  for (const float value : seen) CHECK(std::isnan(value));
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
  CHECK(order_under({Order::forward}) == std::vector<unsigned>{0, 1, 2, 3, 4, 5, 6, 7});
  CHECK(order_under({Order::reverse}) == std::vector<unsigned>{7, 6, 5, 4, 3, 2, 1, 0});
  CHECK(order_under({Order::random, 1}) == order_under({Order::random, 1}));
  CHECK(order_under({Order::random, 1}) != order_under({Order::random, 2}));
}

TEST_CASE("launches that CUDA refuses are refused") {
  const auto check_error = [](unsigned grid, unsigned block, std::size_t shared_bytes,
                              const std::string& words) {
    const auto launch = [&] { simt::launch(nothing, grid, block, shared_bytes); };
    CHECK_THAT(error_of(launch), ContainsSubstring(words));
  };
  check_error(1, 1024, 0, "no error");
  check_error(1, 1025, 0, "1025 threads per block");
  check_error(1u << 31, 1, 0, "a grid beyond");
  check_error(0, 1, 0, "empty");
  check_error(1, 1, 300000, "300000 bytes");
}

TEST_CASE("launch throws the exception of a kernel, and the next launch works") {
  simt::for_each_schedule([] {
    CHECK_THROWS_AS(simt::launch(throw_from, 2, 64, 0, 40), std::runtime_error);
    simt::launch(throw_from, 2, 64, 0, 64);
  });
  CHECK_THAT(error_of([] { simt::launch(trap, 1, 32, 0); }),
             ContainsSubstring("__trap") && ContainsSubstring("thread 5"));
}
